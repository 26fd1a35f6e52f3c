"""Whatever a state dict can hold comes back on another number of ranks, to the last bit.

Processes are dear, so many examples share a checkpoint, and it goes around: one rank saves what four restore and save
anew, then two, then three, then one again. A failure names the tensor that differs, and how it was made.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gpuctl import BucketReader, BucketWriter, Checkpointer
from tests.trainers.rank_scripts.checkpointing import kept
from tests.trainers.ranks import run

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *([torch.float4_e2m1fn_x2] if torch.__version__ >= "2.10" else []),  # before, it could not be copied
]
MORE_DTYPES = [*DTYPES, torch.bits8, torch.bits16]
"""DCP has no size for these."""
WORLDS = [1, 4, 2, 3, 1]
BASE = 2048
"""Elements of the storage that all tensors with the same seed and dtype are views of."""
OPS = ("transposed", "strided", "expanded", "reversed", "conjugated", "negated")


@dataclass(frozen=True)
class Leaf:
    """How a tensor is made, on every rank alike."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    at: int
    """Where in its storage it begins."""
    ops: tuple[str, ...]
    split: tuple[int, int] = (-1, -1)
    """Of a ``DTensor``: the dimension that each dimension of the mesh shards (modulo), or -1: replicated."""


@st.composite
def leaves(draw: st.DrawFn, dtypes: list[torch.dtype] = MORE_DTYPES) -> Leaf:
    return Leaf(
        draw(st.sampled_from(dtypes)),
        tuple(draw(st.just([3, 3]) | st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7]), max_size=3))),
        draw(st.integers(0, 1)),
        draw(st.sampled_from([0, 0, 0, 8, 9])),
        tuple(draw(st.lists(st.sampled_from(OPS), max_size=3))),
        (draw(st.integers(-1, 2)), draw(st.integers(-1, 2))),
    )


KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
ARRAYS = st.builds(
    lambda kind, size: np.arange(size).astype(kind),
    st.sampled_from(["<i2", "<f4", "<c16", "?", "<u8"]),
    st.integers(0, 9),
)
TREES = st.recursive(
    leaves() | leaves() | VALUES | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2).map(Counter)
    ),
    max_leaves=10,
)


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    found = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def draw(example: Any) -> None:
        found.append(example)

    draw()
    return found


# -- how an example becomes a state -----------------------------------------------------------------------------------


@cache
def meshes() -> list[DeviceMesh]:
    """Of all ranks, in a row and as a grid. Each is several process groups, so there are two in a process."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    grid = (2, 2) if world == 4 else (world, 1)
    return [init_device_mesh("cpu", (world,)), init_device_mesh("cpu", grid)] if world > 1 else []


class Factory:
    """Makes tensors, all blank if ``blank`` says so, in a world of so many ranks."""

    def __init__(self, blank: bool) -> None:
        self._blank = blank
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def tree(self, of: Any) -> Any:
        if isinstance(of, Leaf):
            return self.whole(of)
        if isinstance(of, list | tuple):
            return type(of)(self.tree(item) for item in of)
        if isinstance(of, dict) and not isinstance(of, Counter):
            return {key: self.tree(item) for key, item in of.items()}
        return of

    def whole(self, leaf: Leaf) -> Tensor:
        base = self._storages.setdefault((leaf.seed, leaf.dtype), _storage(leaf, self._blank))
        view = base[leaf.at : leaf.at + math.prod(leaf.shape)].view(leaf.shape)
        for op in leaf.ops:
            view = _turned(op, view)
        return view

    def part(self, leaf: Leaf) -> Tensor:
        """As ``whole``, or this rank's shard of it where it is sharded and there are several; not expanded if blank,
        since nothing can be loaded into that."""
        whole = self.whole(leaf)
        if leaf.split == (-1, -1) or not meshes():
            return _apart(whole) if self._blank else whole
        mesh = meshes()[leaf.seed % 2]
        placements = [_placement(dim, whole) for dim in leaf.split[: mesh.ndim]]
        sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        local = _apart(whole) if self._blank else whole
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            local = local.narrow(dim, min(offset, local.shape[dim]), size)
        stride = torch.empty(whole.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=stride)

    def module(self, of: dict[str, Leaf]) -> nn.Module:
        """Every other one as a parameter, the rest as buffers."""
        module = nn.Module()
        for number, (name, leaf) in enumerate(of.items()):
            tensor = self.part(leaf)
            if number % 2:
                module.register_buffer(name, tensor)
            else:
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        return module


def _storage(leaf: Leaf, blank: bool) -> Tensor:
    if blank:
        return torch.zeros(BASE, dtype=torch.uint8).repeat(leaf.dtype.itemsize).view(leaf.dtype)
    generator = torch.Generator().manual_seed(leaf.seed)
    if leaf.dtype.is_complex:  # finite: there is no telling what becomes of a NaN's bits in a conjugated view
        return torch.view_as_complex(torch.randn(BASE, 2, generator=generator).double()).to(leaf.dtype)
    most = 2 if leaf.dtype == torch.bool else 256
    raw = torch.randint(0, most, (BASE * leaf.dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(leaf.dtype)


def _turned(op: str, tensor: Tensor) -> Tensor:
    if op == "conjugated":
        return tensor.conj() if tensor.is_complex() else tensor
    if op == "negated":
        # complex32 has no views of its parts
        return tensor.conj().imag if tensor.dtype in (torch.complex64, torch.complex128) else tensor
    if tensor.dim() == 0:
        return tensor
    if op == "transposed":
        return tensor.transpose(0, -1)
    if op == "strided":
        return tensor[..., ::2]
    if op == "expanded":
        return tensor.unsqueeze(1).expand(-1, 2, *tensor.shape[1:])
    return tensor[tensor.shape[0] // 2 :]


def _apart(tensor: Tensor) -> Tensor:
    return (
        tensor
        if tensor.numel() < 2 or 0 not in tensor.stride()
        else tensor.clone(memory_format=torch.contiguous_format)
    )


def _placement(dim: int, tensor: Tensor) -> Placement:
    return Replicate() if dim == -1 or not tensor.dim() else Shard(dim % tensor.dim())


def state_of(trees: dict[str, Any], tensors: dict[str, Leaf], blank: bool) -> dict[str, Any]:
    """Trees, whose tensors are whole everywhere, and a model, whose tensors may be sharded."""
    made = Factory(blank)
    return {
        **{name: None if blank else made.tree(of) for name, of in trees.items()},
        "model": made.module({name.removeprefix("model."): of for name, of in tensors.items()}),
    }


# -- what ranks do ----------------------------------------------------------------------------------------------------


def hop(source: str | None, target: str, trees: dict[str, Any], tensors: dict[str, Leaf]) -> list[str]:
    """Restore from ``source`` what it should have, and save it to ``target``. What differed."""
    wrong: list[str] = []
    state = state_of(trees, tensors, blank=source is not None)
    if source is not None:
        Checkpointer(source).restore(state)
        expected = state_of(trees, tensors, blank=False)
        for name, of in trees.items():
            wrong += differing(state[name], expected[name], of, name)
        found, right = (whole["model"].state_dict(prefix="model.") for whole in (state, expected))
        for name, of in tensors.items():
            wrong += differing(found[name], right[name], of, name)
    kept(Checkpointer(target), 1, state)
    return wrong


def hop_of_dcp(source: str | None, target: str, tensors: dict[str, Leaf]) -> list[str]:
    """The same with torch.distributed.checkpoint."""
    wrong: list[str] = []
    blank = Factory(source is not None)
    state: dict[str, Any] = {name: blank.part(of) for name, of in tensors.items()}
    if source is not None:
        dcp.load(state, storage_reader=BucketReader(source))
        right = Factory(False)
        for name, of in tensors.items():
            wrong += differing(state[name], right.part(of), of, name)
    dcp.save(state, storage_writer=BucketWriter(target, step=1))
    return wrong


def differing(found: Any, expected: Any, example: Any, at: str) -> Iterator[str]:
    """Where the two differ, and how that was made."""
    if isinstance(expected, Tensor | np.ndarray):
        if _bits(found) != _bits(expected):
            yield f"{at} is {_bits(found)}, not {_bits(expected)}: {example}"
    elif type(found) is not type(expected):
        yield f"{at} is a {type(found)}, not a {type(expected)}: {example}"
    elif isinstance(expected, Counter) or not isinstance(expected, dict | list | tuple):
        if repr(found) != repr(expected):
            yield f"{at} is {found!r}, not {expected!r}"
    elif isinstance(expected, dict):
        if list(found) != list(expected):
            yield f"{at} has {list(found)}, not {list(expected)}"
        else:
            for key, item in expected.items():
                yield from differing(found[key], item, example[key], f"{at}[{key!r}]")
    elif len(found) != len(expected):
        yield f"{at} has {len(found)} items, not {len(expected)}"
    else:
        for n, item in enumerate(expected):
            yield from differing(found[n], item, example[n], f"{at}[{n}]")


def _bits(value: Any) -> tuple[Any, ...]:
    """All there is to know of a tensor, of a shard, or of an array."""
    if isinstance(value, DTensor):
        return "shard", value.shape, value.placements, *_bits(value.to_local())
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype), value.tobytes()
    if not isinstance(value, Tensor):
        return (type(value), value)
    plain = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return "tensor", tuple(value.shape), value.dtype, plain.reshape(-1).view(torch.uint8).numpy().tobytes()


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_state_comes_back_on_any_other_world(file_url: str) -> None:
    trees = {f"tree{n}": of for n, of in enumerate(drawn(TREES, 150))}
    tensors = {f"model.t{n}": of for n, of in enumerate(drawn(leaves(), 200))}
    around(file_url, {**trees, **tensors}, hop, trees, tensors)


@pytest.mark.slow
def test_what_dcp_saves_comes_back_on_any_other_world(file_url: str) -> None:
    tensors = {f"t{n}": of for n, of in enumerate(drawn(leaves(DTYPES), 200))}
    around(file_url, tensors, hop_of_dcp, tensors)


def around(url: str, named: dict[str, Any], body: Callable[..., list[str]], *arguments: Any) -> None:
    source = None
    for number, world in enumerate(WORLDS):
        target = f"{url}-{number}"
        try:
            told = run(world, body, source, target, *arguments)
        except AssertionError as error:
            met = [name for name in named if re.search(rf"\b{name}\b", f"{error}")]
            made = "".join(f"\n{name} is {named[name]}" for name in met)
            raise AssertionError(f"{error}{made or alone(named)}") from None
        for rank, wrong in enumerate(told):
            assert wrong == [], f"rank {rank} of {world}, after {WORLDS[:number]}"
        source = target


def alone(named: dict[str, Any]) -> str:
    """The first example that cannot be saved and restored by a single process either."""
    for name, of in named.items():
        with TemporaryDirectory() as folder:
            try:
                state = {name: Factory(False).tree(of)}
                kept(Checkpointer(folder), 1, state)
                Checkpointer(folder).restore(state)
            except Exception as error:  # noqa: BLE001 - any is told
                return f"\n{name} is {of}: {error!r}"
    return "\neach example alone comes back in a single process"
