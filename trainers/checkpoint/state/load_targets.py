"""Where the tensors of a checkpoint go in a state, in place where they can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from gpuctl.cluster.checkpoints.manifest import Manifest, TensorIndex
from gpuctl.cluster.checkpoints.treespec import tensor_names
from gpuctl.cluster.errors import BadInput, Damaged
from gpuctl.trainers.checkpoint.state.optimizers import (
    is_sharded,
    untouched,
    why_no_state,
)
from gpuctl.trainers.checkpoint.state.private import bare, check_not_mixed, key_of, keys_of, shown
from gpuctl.trainers.checkpoint.state.rng import set_rng_state
from gpuctl.trainers.checkpoint.state.state_tensors import (
    _HINT,
    STRATEGY,
    State,
    _bare,
    _is_stateful,
    _model_of,
    _no_shards_into,
    _value_of,
)
from gpuctl.trainers.checkpoint.state.treespec import flatten_state, unflatten_state
from gpuctl.trainers.checkpoint.tensor_bytes import dtype_of
from gpuctl.trainers.gpus import gpus_of


class LoadTargets:
    """The places in ``state`` where a checkpoint's tensors go, in place where they can. Names that the checkpoint has
    beyond those are left alone, but where an optimizer would go on without the strategy that it went with.

    ``value`` reads a JSON document of the checkpoint, ``None`` if it has none of that name. Raises ``BadInput`` naming
    the first tensor that differs before anything is read into ``state``.
    """

    def __init__(
        self,
        state: State,
        manifest: Manifest,
        at: str,
        rank: int,
        value: Callable[[str], bytes | None],
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._at = f"checkpoint {at}"
        self._treespecs: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._check_names()
        self._items = {
            next(key for key in keys_of(name, item, rank) if f"@plain.{key}" in manifest.values): (name, bare(item))
            for name, item in state.items()
        }
        for key, (_, item) in self._items.items():
            self._treespecs[key] = self._parsed(f"@plain.{key}", value(f"@plain.{key}"))
            self.tensors |= self._targets(key, item)
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
        for key, (name, item) in self._items.items():
            _set(name, item, unflatten_state(self._treespecs[key], self.tensors), self._state)
        if self._rng is not None:
            set_rng_state(unflatten_state(self._rng, {}), gpus_of(self.tensors.values()))

    def _check_names(self) -> None:
        """Raises ``BadInput`` unless the checkpoint has all of the state, and the state all that must not be left."""
        check_not_mixed(self._state)
        keys = (name.removeprefix("@plain.") for name in self._manifest.values if name.startswith("@plain."))
        there = list(dict.fromkeys(map(shown, keys)))
        for name, item in self._state.items():
            if (wanted := shown(key_of(name, item, 0))) not in there:
                raise BadInput(f"{self._at} has no {wanted}, only {', '.join(there)}", _HINT)
        if any(isinstance(bare(item), torch.optim.Optimizer) for item in self._state.values()):
            for found in self._manifest.values:
                if found.startswith(STRATEGY) and (name := found.removeprefix(STRATEGY)) not in self._state:
                    raise BadInput(f"{self._at} has a {name!r}, which this run has not", _HINT)

    def _targets(self, name: str, item: object) -> dict[str, torch.Tensor]:
        """The tensors to load ``item`` into."""
        kept = {found: self._kept(found) for found in tensor_names(self._treespecs[name])}
        if isinstance(item, torch.optim.Optimizer):
            value = self._room(name, item)
        else:
            value = _value_of(item, self._state) if isinstance(item, torch.nn.Module) else None
        if value is None:
            # Such an object makes its own tensors, and judges by itself what it is given.
            there = _there(name, item) if kept else {}
            return {found: _made_like(there.get(found), tensor) for found, tensor in kept.items()}
        ours: dict[str, torch.Tensor] = {}
        flatten_state(value, name, ours)
        for found in [*ours, *(extra for extra in kept if extra not in ours)]:
            theirs, mine = _kind_kept(kept.get(found)), _kind(ours.get(found))
            if theirs != mine:
                raise BadInput(
                    f"{self._at} belongs to another model: {found} is {theirs} in the checkpoint and {mine} here", _HINT
                )
            if _is_expanded(ours[found]):
                raise BadInput(f"{found!r} is an expanded tensor, which cannot be loaded into", "clone it")
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
        treespec = self._treespecs[name]
        kept = unflatten_state(treespec, dict.fromkeys(tensor_names(treespec), torch.empty(0)))
        why_not = why_no_state(optimizer)
        if why_not and sharded:
            raise _no_shards_into(name, why_not)
        room: dict[str, Any] | None = None if why_not else _value_of(optimizer, self._state)
        if room is None or (room["state"] and not kept["state"]):
            # No tensor tells whether it was the same kind of optimizer.
            theirs = {option for group in kept["param_groups"] for option in group}
            if lacks := sorted(optimizer.defaults.keys() - theirs):
                raise BadInput(
                    f"{self._at} belongs to another optimizer: {name!r} has no {', '.join(lacks)} there", _HINT
                )
        return room and {**room, "state": {k: v for k, v in room["state"].items() if k in kept["state"]}}


def metadata_of(manifest: Manifest, wanted: Iterable[str]) -> Metadata:
    """The index of the tensors ``wanted``, in the planners' words."""
    known: dict[str, Any] = {}
    for name in wanted:
        tensor = manifest.tensors[name]
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        known[name] = TensorStorageMetadata(TensorProperties(dtype_of(tensor)), torch.Size(tensor.shape), chunks)
    return Metadata(known)


def _there(name: str, item: object) -> dict[str, torch.Tensor]:
    """The tensors that ``item`` has now, by the names that they are kept under. Of an object with a state dict only its
    shards: it may be some work to have one."""
    stateful = _is_stateful(item)
    if isinstance(item, torch.optim.Optimizer) or (stateful and not dist.is_initialized()):
        return {}
    found: dict[str, torch.Tensor] = {}
    with suppress(BadInput):  # it only holds the place of what is loaded
        flatten_state(item.state_dict() if stateful else item, name, found)  # type: ignore[attr-defined]
    return {at: t for at, t in found.items() if isinstance(t, DTensor) or not stateful}


def _made_like(there: torch.Tensor | None, kept: TensorIndex) -> torch.Tensor:
    """Room for a tensor where the one is that it takes the place of, and sharded as that is; else whole on the host."""
    shape, dtype = torch.Size(kept.shape), dtype_of(kept)
    if there is None or there.device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="cpu")
    if isinstance(there, DTensor) and there.shape == shape:
        return torch.empty_like(there, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=there.device)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() > 0 and any(
        size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)
    )


def _set(name: str, item: Any, value: Any, state: State) -> None:
    if isinstance(item, torch.nn.Module):
        if value and (bare := _bare(item)) is not None:
            bare.load_state_dict(value)
        elif value:
            set_model_state_dict(item, value)
    elif isinstance(item, torch.optim.Optimizer) and (model := _model_of(item, state)):
        # Not strict: a parameter that no gradient ever came to has no state.
        with untouched(item):
            set_optimizer_state_dict(model, item, _for_all(value), options=StateDictOptions(strict=False))
        for parameter in [parameter for parameter, of in item.state.items() if not of]:
            del item.state[parameter]
    elif _is_stateful(item):
        item.load_state_dict(value)
    else:
        state[name] = value


def _for_all(value: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with an empty one for each parameter that has none: torch 2.9 fails without."""
    names = (name for group in value["param_groups"] for name in group["params"])
    return {**value, "state": {**{name: {} for name in names}, **value["state"]}}


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _kind_kept(tensor: TensorIndex | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
