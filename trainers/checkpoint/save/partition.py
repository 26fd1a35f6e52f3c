"""Which bytes of a state this rank writes, decided without asking anyone.

A checkpoint holds every tensor once, and every rank writes as much of it as any other. What several ranks hold alike (a
parameter under DDP, a shard that HSDP has copies of) is laid end to end in the order of names, and cut into as many
equal stretches as there are holders; so even one huge tensor is written by all of them. A cut falls on a multiple of 64
bytes from the tensor's beginning, which is a whole number of elements of any dtype.

Frozen parameters come first, in parts of their own, so that what never changes is not written again with what does (see
``host_buffer``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.state.state_tensors import StateTensors

ALIGN = 64


class Box(msgspec.Struct, frozen=True):
    """A tensor's box: all of it, or this rank's shard."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.sizes) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes ``[low, high)`` of the box of tensor ``name``, in row-major order."""

    name: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class RankPartition:
    """The slices and values of a checkpoint that one rank writes, in order."""

    boxes: dict[str, Box]
    slices: tuple[Slice, ...]
    values: tuple[str, ...]
    aliases: dict[str, str]
    """Tensors that are another one under another name: they are written once."""
    frozen: int = 0
    """How many of the slices, from the first on, are of frozen parameters."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a rank tells the others it holds, where ranks do not hold the same."""

    names: tuple[str, ...]
    """Of tensors and values."""
    aliases: dict[str, str]
    alike: set[str]
    frozen: set[str]


@dataclass(frozen=True, slots=True)
class Placement:
    """What each rank holds. They cut alike only what they see alike, so what one rank alone takes for an alias, or for
    frozen, is none."""

    ranks: dict[str, list[int]]
    """For each name of a tensor or value: those that have it, in order."""
    aliases: dict[str, str]
    alike: set[str]
    frozen: set[str]


def signature(contents: StateTensors) -> str:
    """All that a rank's share depends on: where it is the same text on all ranks, they hold the same; and where it is
    the text of an earlier save, the share is that one's. Which tensors share memory may change from save to save."""
    aliases = _aliases(contents.tensors)
    tensors = (
        f"{name} {t.dtype} {tuple(t.shape)} {t.placements if isinstance(t, DTensor) else '-'}"
        f" {'alike' * (name in contents.alike)} {'frozen' * (name in contents.frozen)} {aliases.get(name, '')}"
        for name, t in contents.tensors.items()
    )
    return "\n".join((*tensors, *(name for name in contents.values if not name.startswith("@rng."))))


def held_of(contents: StateTensors) -> Inventory:
    names = (*contents.tensors, *contents.values)
    return Inventory(names, _aliases(contents.tensors), contents.alike, contents.frozen)


def placement_of(told: Sequence[Inventory]) -> Placement:
    """The placement from each rank's inventory, in rank order."""
    ranks: dict[str, list[int]] = {}
    for rank, held in enumerate(told):
        for name in held.names:
            ranks.setdefault(name, []).append(rank)
    aliases = {}
    for name, having in ranks.items():
        of = told[having[0]].aliases.get(name)
        if of is not None and all(told[rank].aliases.get(name) == of for rank in having):
            aliases[name] = of
    alike = {name for name, having in ranks.items() if all(name in told[rank].alike for rank in having)}
    frozen = {name for name, having in ranks.items() if all(name in told[rank].frozen for rank in having)}
    return Placement(ranks, aliases, alike, frozen)


def partition_of(contents: StateTensors, rank: int, world: int, holders: Placement | None = None) -> RankPartition:
    """The partition of ``rank``. ``holders`` is needed only where the ranks' outlines differ (pipeline stages).

    Raises ``BadInput`` for a tensor that cannot be kept: sparse, quantized, or sums that are yet to be added up.
    """
    everyone = range(world)
    boxes: dict[str, Box] = {}
    groups: dict[tuple[object, ...], tuple[int, int, list[str]]] = {}
    alike, frozen = (contents.alike, contents.frozen) if holders is None else (holders.alike, holders.frozen)
    aliases = _aliases(contents.tensors)
    if holders is not None:
        aliases = {name: of for name, of in aliases.items() if name in holders.aliases}
    for name in sorted(contents.tensors, key=lambda name: (name not in frozen, name)):
        if name in aliases:
            continue
        tensor = contents.tensors[name]
        boxes[name] = _box(name, tensor)
        having = everyone if holders is None else holders.ranks[name]
        if isinstance(tensor, DTensor):
            key, place, copies = _copies(tensor)
        elif name in alike:
            key, place, copies = tuple(having), having.index(rank), len(having)
        elif having[0] == rank:
            key, place, copies = ("first",), 0, 1
        else:
            continue
        groups.setdefault((name in frozen, *key), (place, copies, []))[2].append(name)
    slices = [part for place, copies, names in groups.values() for part in _cut(names, boxes, place, copies)]
    values = [name for name in contents.values if holders is None or holders.ranks[name][0] == rank]
    if holders is None and rank != 0:
        values = [name for name in values if name.startswith("@rng.")]
    return RankPartition(boxes, tuple(slices), tuple(values), aliases, sum(part.name in frozen for part in slices))


def _box(name: str, tensor: Tensor) -> Box:
    refuse_layout(name, tensor)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(dtype, shape, (0,) * len(shape), shape)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise BadInput(f"{name!r} of the state to save is not reduced yet ({tensor.placements})", "redistribute it")
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(dtype, shape, tuple(offsets), tuple(sizes))


def refuse_layout(name: str, tensor: Tensor) -> None:
    """Raises ``BadInput`` for a sparse or quantized tensor."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise BadInput(f"{name!r} of the state to save is {tensor.layout}, which a checkpoint cannot hold", "use dense")


def _copies(tensor: DTensor) -> tuple[tuple[object, ...], int, int]:
    """What identifies the ranks that hold the same shards as this one, our place among them, and their number."""
    mesh, place, copies = tensor.device_mesh, 0, 1
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank has no tensors of a mesh that it is not in"
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            place, copies = place * mesh.size(dim) + coordinate[dim], copies * mesh.size(dim)
    kinds = tuple(isinstance(placement, Replicate) for placement in tensor.placements)
    return ("mesh", mesh, kinds), place, copies


def _cut(names: Sequence[str], boxes: Mapping[str, Box], place: int, copies: int) -> Iterable[Slice]:
    """The stretch number ``place`` of ``copies`` of the tensors ``names``, laid end to end."""
    ends = list(accumulate(boxes[name].bytes for name in names))
    total = ends[-1] if ends else 0
    first, last = total * place // copies, total * (place + 1) // copies
    for name, end in zip(names, ends, strict=True):
        size = boxes[name].bytes
        start = end - size
        low, high = aligned(first - start, size), aligned(last - start, size)
        if low < high:
            yield Slice(name, low, high)


def aligned(cut: int, size: int) -> int:
    """``cut`` within a tensor of ``size`` bytes. Both neighbours round alike, so nothing is lost between them."""
    return size if cut >= size else max(0, cut) // ALIGN * ALIGN


def padded(size: int) -> int:
    """``size`` bytes, up to a multiple of ``ALIGN``."""
    return -(-size // ALIGN) * ALIGN


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied weights. The first name in order is the one that is written."""
    seen: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, DTensor) or tensor.numel() == 0:
            continue
        read_as = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
        same = (tensor.data_ptr(), tensor.device, read_as)
        if seen.setdefault(same, name) != name:
            aliases[name] = seen[same]
    return aliases
