"""What a checkpoint holds of a training run, and how it comes back.

A *state* is a dict of names: models and their optimizers by their parameters' full names (without DDP's, FSDP's or the
compiler's prefixes, so that any world and any wrapping can read it), other objects, and an optimizer over several
models, by their ``state_dict``, and plain values as they are. In a checkpoint it is flat: each tensor under its dotted
name, the skeleton of the rest of item ``model`` in ``@plain.model``, and each rank's random number generators in
``@rng.<rank>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from gpuctl.cluster.errors import BadInput, Damaged
from gpuctl.cluster.manifest import Manifest, TensorIndex
from gpuctl.trainers.optimizers import is_sharded, parameters_of, untouched, wants_closure, why_no_state
from gpuctl.trainers.plain import names, pack, unpack
from gpuctl.trainers.rng import rng_state, set_rng_state

State = MutableMapping[str, Any]

_HINT = "use another checkpoint folder, or the model that this one was made with"


@dataclass(frozen=True, slots=True)
class Contents:
    """What this rank has of a state at one moment. Nothing is copied yet."""

    tensors: dict[str, torch.Tensor]
    """By dotted name. A ``DTensor`` is this rank's shard of one."""
    alike: set[str]
    """Those that all ranks hold alike: parameters and optimizer states. All other tensors that are no shards are rank
    0's to write, whose buffers are the ones that DDP goes by."""
    frozen: set[str]
    """Parameters that are not trained."""
    values: dict[str, bytes]
    """JSON, by name."""


def contents_of(state: State, rank: int) -> Contents:
    """Raises ``BadInput`` naming what cannot be kept."""
    contents = Contents({}, set(), set(), {f"@rng.{rank}": _json(pack(rng_state(), "rng", {}))})
    owners: dict[str, str] = {}
    for name, item in state.items():
        if isinstance(item, torch.optim.Optimizer) and is_sharded(item) and wants_closure(item):
            raise _no_shards_into(name, f"{type(item).__name__}.step needs a closure")
        tensors: dict[str, torch.Tensor] = {}
        contents.values[f"@plain.{name}"] = _json(pack(_value_of(item, state), name, tensors))
        for found in tensors:
            if (other := owners.setdefault(found, name)) != name:
                raise BadInput(
                    f"{other!r} and {name!r} of the state both have a tensor {found!r}", "rename one of them"
                )
        contents.tensors.update(tensors)
        if isinstance(item, torch.nn.Module):
            parameters = {_identity(p): p.requires_grad for p in item.parameters()}
            contents.alike.update(found for found, t in tensors.items() if _identity(t) in parameters)
            contents.frozen.update(found for found, t in tensors.items() if not parameters.get(_identity(t), True))
        elif _is_by_parameter(item, state):
            contents.alike.update(tensors)
    return contents


class Targets:
    """Where the tensors of a checkpoint go in ``state``, in place where they can. Names that the checkpoint has beyond
    those are left alone.

    ``value`` reads a JSON document of the checkpoint, ``None`` if it has none of that name. Raises ``BadInput`` naming
    the first tensor that differs before anything is read into ``state``.
    """

    def __init__(
        self, state: State, manifest: Manifest, at: str, rank: int, value: Callable[[str], bytes | None]
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._at = f"checkpoint {at}"
        self._skeletons: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        missing = [name for name in state if f"@plain.{name}" not in manifest.values]
        if missing:
            there = (name.removeprefix("@plain.") for name in manifest.values if name.startswith("@plain."))
            raise BadInput(f"{self._at} has no {missing[0]!r}, only {', '.join(map(repr, there))}", _HINT)
        for name, item in state.items():
            self._skeletons[name] = self._parsed(f"@plain.{name}", value(f"@plain.{name}"))
            self.tensors |= self._targets(name, item)
        self._rng = self._parsed(f"@rng.{rank}", value(f"@rng.{rank}"))

    def items(self) -> list[ReadItem]:
        """Which box of which chunk goes into which box of which tensor: what torch plans for any pair of layouts."""
        return list(create_default_local_load_plan(self.tensors, metadata_of(self._manifest, self.tensors)).items)

    def box(self, item: ReadItem) -> torch.Tensor:
        """The box of our own tensor that ``item`` fills, as a view."""
        tensor = self.tensors[item.dest_index.fqn]
        view = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def finish(self) -> None:
        """Hand the loaded values to their owners. A rank that the checkpoint's world did not have keeps its own random
        number generators."""
        for name, item in list(self._state.items()):
            _set(name, item, unpack(self._skeletons[name], self.tensors), self._state)
        if self._rng is not None:
            set_rng_state(unpack(self._rng, {}))

    def _targets(self, name: str, item: object) -> dict[str, torch.Tensor]:
        """The tensors to load ``item`` into."""
        kept = {found: self._kept(found) for found in names(self._skeletons[name])}
        if isinstance(item, torch.optim.Optimizer):
            value = self._room(name, item)
        else:
            value = _value_of(item, self._state) if isinstance(item, torch.nn.Module) else None
        if value is None:
            # Such an object makes its own tensors, and judges by itself what it is given.
            there = _there(name, item) if kept else {}
            return {found: _made_like(there.get(found), tensor) for found, tensor in kept.items()}
        ours: dict[str, torch.Tensor] = {}
        pack(value, name, ours)
        for found in [*ours, *(extra for extra in kept if extra not in ours)]:
            theirs, mine = _kind_kept(kept.get(found)), _kind(ours.get(found))
            if theirs != mine:
                raise BadInput(f"{self._at} is of another model: {found} is {theirs} there and {mine} here", _HINT)
            if _is_expanded(ours[found]):
                raise BadInput(f"{found!r} is expanded here, so that nothing can be loaded into it", "clone it")
        return ours

    def _parsed(self, name: str, text: bytes | None) -> Any:
        try:
            return None if text is None else json.loads(text)
        except ValueError as error:
            raise Damaged(f"{self._at} has no JSON in {name!r}") from error

    def _kept(self, name: str) -> TensorIndex:
        if name not in self._manifest.tensors:
            raise Damaged(f"{self._at} has no tensor {name!r}, which it refers to")
        return self._manifest.tensors[name]

    def _room(self, name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """The state dict to load ``optimizer`` into, ``None`` if it is to be given whole tensors. A parameter without a
        state when the checkpoint was made, because no gradient had come to it, gets none."""
        sharded = is_sharded(optimizer)
        if not sharded and _model_of(optimizer, self._state) is None:
            return None
        skeleton = self._skeletons[name]
        kept = unpack(skeleton, dict.fromkeys(names(skeleton), torch.empty(0)))
        why_not = why_no_state(optimizer)
        if why_not and sharded:
            raise _no_shards_into(name, why_not)
        room: dict[str, Any] | None = None if why_not else _value_of(optimizer, self._state)
        if room is None or (room["state"] and not kept["state"]):
            # No tensor tells whether it was the same kind of optimizer.
            theirs = {option for group in kept["param_groups"] for option in group}
            if lacks := sorted(optimizer.defaults.keys() - theirs):
                raise BadInput(f"{self._at} is of another optimizer: {name!r} has no {', '.join(lacks)} there", _HINT)
        return room and {**room, "state": {k: v for k, v in room["state"].items() if k in kept["state"]}}


def metadata_of(manifest: Manifest, wanted: Iterable[str]) -> Metadata:
    """The index of the tensors ``wanted``, in the planners' words."""
    known: dict[str, Any] = {}
    for name in wanted:
        tensor = manifest.tensors[name]
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        known[name] = TensorStorageMetadata(TensorProperties(dtype_of(tensor)), torch.Size(tensor.shape), chunks)
    return Metadata(known)


def dtype_of(tensor: TensorIndex) -> torch.dtype:
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise Damaged(f"this torch knows no dtype {tensor.dtype!r}", "use the version that wrote the checkpoint")
    return found


def _there(name: str, item: object) -> dict[str, torch.Tensor]:
    """The tensors that ``item`` has now, by the names that they are kept under. Of an object with a state dict only its
    shards: it may be some work to have one."""
    stateful = _is_stateful(item)
    if isinstance(item, torch.optim.Optimizer) or (stateful and not dist.is_initialized()):
        return {}
    found: dict[str, torch.Tensor] = {}
    with suppress(BadInput):  # it only holds the place of what is loaded
        pack(item.state_dict() if stateful else item, name, found)  # type: ignore[attr-defined]
    return {at: t for at, t in found.items() if isinstance(t, DTensor) or not stateful}


def _made_like(there: torch.Tensor | None, kept: TensorIndex) -> torch.Tensor:
    """Room for a tensor where the one is that it takes the place of, and sharded as that is; else whole on the host."""
    shape, dtype = torch.Size(kept.shape), dtype_of(kept)
    if there is None or there.device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="cpu")
    if isinstance(there, DTensor) and there.shape == shape:
        return torch.empty_like(there, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=there.device)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What tells whether it is another tensor under another name. Views of one memory that differ in anything else are
    not, on all ranks alike: a shard may begin where a whole tensor does on one of them."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().data_ptr(), tensor.dtype, tensor.shape, tensor.placements
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() > 0 and any(
        size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)
    )


def _value_of(item: Any, state: State) -> Any:
    """What is kept of ``item``: its state dict, or the item itself."""
    if isinstance(item, torch.nn.Module):
        # Not strict: a loss, or a layer without weights, has nothing to keep.
        return get_model_state_dict(item, options=StateDictOptions(strict=False))
    if isinstance(item, torch.optim.Optimizer) and (model := _model_of(item, state)):
        with untouched(item):
            return get_optimizer_state_dict(model, item)
    return item.state_dict() if _is_stateful(item) else item


def _set(name: str, item: Any, value: Any, state: State) -> None:
    if isinstance(item, torch.nn.Module):
        if value:
            set_model_state_dict(item, value)
    elif isinstance(item, torch.optim.Optimizer) and (model := _model_of(item, state)):
        # Not strict: a parameter that no gradient ever came to has no state.
        with untouched(item):
            set_optimizer_state_dict(model, item, value, options=StateDictOptions(strict=False))
    elif _is_stateful(item):
        item.load_state_dict(value)
    else:
        state[name] = value


def _no_shards_into(name: str, why: str) -> BadInput:
    return BadInput(
        f"{name!r} of the state cannot be loaded into shards: {why}",
        "use whole parameters (DDP), or leave it out of the state",
    )


def _model_of(optimizer: torch.optim.Optimizer, state: State) -> torch.nn.Module | None:
    """The model in ``state`` that has all parameters of ``optimizer``."""
    wanted = set(map(id, parameters_of(optimizer)))
    for item in state.values():
        if isinstance(item, torch.nn.Module) and wanted <= {id(p) for p in item.parameters()}:
            return item
    return None


def _is_by_parameter(item: object, state: State) -> bool:
    """Whether ``item`` is kept by the full names of parameters."""
    return isinstance(item, torch.nn.Module) or (
        isinstance(item, torch.optim.Optimizer) and _model_of(item, state) is not None
    )


def _is_stateful(item: object) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _kind_kept(tensor: TensorIndex | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
