"""What a checkpoint holds of a training run, for ``torch.distributed.checkpoint`` to plan.

A *state* is a dict of names: models and their optimizers by their parameters' full names (without DDP's, FSDP's or the
compiler's prefixes, so that any world and any wrapping can read it), other objects by their ``state_dict``, and plain
values as they are. In a checkpoint it is flat: each tensor under its dotted name, the skeleton of the rest in
``@plain``, and each rank's random number generators in ``@rng.<rank>``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.plain import names, pack, unpack
from gpuctl.trainers.rng import rng_state, set_rng_state
from gpuctl.trainers.storage import BucketReader, TensorIndex, dtype_of

State = MutableMapping[str, Any]

_PLAIN = "@plain"
_HINT = "use another checkpoint folder, or the model that this one was made with"


class SavePlanner(DefaultSavePlanner):
    """Plans ``state`` of this rank. What all ranks hold alike (parameters, optimizer states) is shared out among them;
    shards are each rank's own; all else is rank 0's, whose buffers are the ones DDP goes by."""

    def __init__(self, state: State, rank: int) -> None:
        super().__init__(flatten_state_dict=False)
        self.flat: dict[str, Any] = {f"@rng.{rank}": pack(rng_state(), "rng", {})}
        skeletons = {}
        for name, item in state.items():
            tensors: dict[str, torch.Tensor] = {}
            skeletons[name] = pack(_value_of(item, state), name, tensors)
            self.flat |= tensors if rank == 0 else _alike(item, tensors, state)
        if rank == 0:
            self.flat[_PLAIN] = skeletons

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  (torch's name)
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return object


class LoadPlanner(DefaultLoadPlanner):
    """Plans how this rank loads ``state``, in place where it can. Names that the checkpoint has beyond those are left
    alone. Raises ``BadInput`` naming the first tensor that differs before anything is read into ``state``."""

    def __init__(self, state: State, reader: BucketReader, rank: int) -> None:
        super().__init__(flatten_state_dict=False)
        self._state = state
        self._reader = reader
        self._rank = rank
        self._skeletons: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._rng: Any = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002
        metadata: Metadata | None = None,  # noqa: ARG002
        is_coordinator: bool = False,
    ) -> None:
        self.metadata = self._reader.metadata()
        self.is_coordinator = is_coordinator
        self._skeletons = self._reader.value(_PLAIN)
        self._rng = self._reader.value(f"@rng.{self._rank}")
        for name, item in self._state.items():
            self._tensors |= self._targets(name, item)
        self.state_dict = self.original_state_dict = self._tensors

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self._tensors, self.metadata)

    def finish(self) -> None:
        """Hand the loaded values to their owners. A rank that the checkpoint's world did not have keeps its own random
        number generators."""
        for name, item in list(self._state.items()):
            _set(name, item, unpack(self._skeletons[name], self._tensors), self._state)
        if self._rng is not None:
            set_rng_state(unpack(self._rng, {}))

    def _targets(self, name: str, item: object) -> dict[str, torch.Tensor]:
        """The tensors to load ``item`` into."""
        at = f"checkpoint {self._reader.entry.path}"
        if name not in self._skeletons:
            raise BadInput(f"{at} has no {name!r}, only {', '.join(map(repr, self._skeletons))}", _HINT)
        kept = {found: self._reader.index().tensors[found] for found in names(self._skeletons[name])}
        if not _is_by_parameter(item, self._state):
            # Such an object makes its own tensors, and judges by itself what it is given.
            return {found: torch.empty(tensor.shape, dtype=dtype_of(tensor)) for found, tensor in kept.items()}
        ours: dict[str, torch.Tensor] = {}
        value = _value_of(item, self._state) if isinstance(item, torch.nn.Module) else self._room(name, item)
        pack(value, name, ours)
        for found in [*ours, *(extra for extra in kept if extra not in ours)]:
            theirs, mine = _kind_kept(kept.get(found)), _kind(ours.get(found))
            if theirs != mine:
                raise BadInput(f"{at} is of another model: {found} is {theirs} there and {mine} here", _HINT)
        return ours

    def _room(self, name: str, optimizer: Any) -> dict[str, Any]:
        """The state dict to load ``optimizer`` into. A parameter without a state when the checkpoint was made, because
        no gradient had come to it, gets none."""
        skeleton = self._skeletons[name]
        kept = unpack(skeleton, dict.fromkeys(names(skeleton), torch.empty(0)))
        with _grads_aside(optimizer):
            room: dict[str, Any] = get_optimizer_state_dict(_model_of(optimizer, self._state), optimizer)  # type: ignore[arg-type]
        if room["state"] and not kept["state"]:
            # No tensor tells whether it was the same kind of optimizer.
            theirs = {option for group in kept["param_groups"] for option in group}
            if lacks := sorted(optimizer.defaults.keys() - theirs):
                at = f"checkpoint {self._reader.entry.path}"
                raise BadInput(f"{at} is of another optimizer: {name!r} has no {', '.join(lacks)} there", _HINT)
        return {**room, "state": {k: v for k, v in room["state"].items() if k in kept["state"]}}


def _value_of(item: Any, state: State) -> Any:
    """What is kept of ``item``: its state dict, or the item itself."""
    if isinstance(item, torch.nn.Module):
        return get_model_state_dict(item)
    if isinstance(item, torch.optim.Optimizer) and (model := _model_of(item, state)):
        with _untouched(item):
            return get_optimizer_state_dict(model, item)
    return item.state_dict() if _is_stateful(item) else item


def _set(name: str, item: Any, value: Any, state: State) -> None:
    if isinstance(item, torch.nn.Module):
        set_model_state_dict(item, value)
    elif isinstance(item, torch.optim.Optimizer) and (model := _model_of(item, state)):
        # Not strict: a parameter that no gradient ever came to has no state.
        with _grads_aside(item):
            set_optimizer_state_dict(model, item, value, options=StateDictOptions(strict=False))
    elif _is_stateful(item):
        item.load_state_dict(value)
    else:
        state[name] = value


@contextmanager
def _untouched(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Reading an optimizer's state must not change it. torch makes up the state of one that has made no step, by a step
    that stays counted (``_init_optim_state``), unless it finds a gradient: so here is one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not parameters or any(p.grad is not None for p in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextmanager
def _grads_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """An optimizer to load into must have its state, which torch makes where there is none, and no gradient either."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


def _model_of(optimizer: torch.optim.Optimizer, state: State) -> torch.nn.Module | None:
    """The model in ``state`` that has all parameters of ``optimizer``."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
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


def _alike(item: object, tensors: dict[str, torch.Tensor], state: State) -> dict[str, torch.Tensor]:
    """Those of ``tensors`` that a rank other than 0 may write: shards, and what is the same on all ranks."""
    if isinstance(item, torch.nn.Module):
        parameters = {p.data_ptr() for p in item.parameters() if not isinstance(p, DTensor)}
        return {k: v for k, v in tensors.items() if isinstance(v, DTensor) or v.data_ptr() in parameters}
    return tensors if _is_by_parameter(item, state) else {k: v for k, v in tensors.items() if isinstance(v, DTensor)}


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _kind_kept(tensor: TensorIndex | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
