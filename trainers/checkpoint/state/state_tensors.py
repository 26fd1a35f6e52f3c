"""What a checkpoint holds of a training run, and how it comes back.

A *state* is a dict of names: models and their optimizers by their parameters' full names (without DDP's, FSDP's or the
compiler's prefixes, so that any world and any wrapping can read it), other objects, and an optimizer over several
models, by their ``state_dict``, and plain values as they are. In a checkpoint it is flat: each tensor under its dotted
name, the skeleton of the rest of item ``model`` in ``@plain.model``, and each rank's random number generators in
``@rng.<rank>``.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.state.optimizers import (
    is_sharded,
    parameters_of,
    untouched,
    wants_closure,
)
from gpuctl.trainers.checkpoint.state.private import bare, check_not_mixed, key_of
from gpuctl.trainers.checkpoint.state.rng import rng_state
from gpuctl.trainers.checkpoint.state.treespec import flatten_state
from gpuctl.trainers.gpus import gpus_of

State = MutableMapping[str, Any]
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""What torch's wrappers (the compiler's, activation checkpointing's) call the module that they wrap."""
STRATEGY = "@strategy."
"""Before the name of an item without which the rest of a checkpoint must not be trained on."""
_HINT = "use another checkpoint folder, or the model and the strategy that this one was made with"


@dataclass(frozen=True, slots=True)
class StateTensors:
    """The tensors and values of a state on this rank at one moment. Nothing is copied yet."""

    tensors: dict[str, torch.Tensor]
    """By dotted name. A ``DTensor`` is this rank's shard of one."""
    alike: set[str]
    """Those that all ranks hold alike: parameters, optimizers and strategies. All other tensors that are no shards are
    rank 0's to write, whose buffers are the ones that DDP goes by."""
    frozen: set[str]
    """Parameters that are not trained."""
    values: dict[str, bytes]
    """JSON, by name."""


def contents_of(state: State, rank: int) -> StateTensors:
    """Raises ``BadInput`` naming what cannot be kept."""
    contents = StateTensors({}, set(), set(), {})
    owners: dict[str, str] = {}
    check_not_mixed(state)
    for name, kept in state.items():
        item, key = bare(kept), key_of(name, kept, rank)
        if isinstance(item, torch.optim.Optimizer) and is_sharded(item) and wants_closure(item):
            raise _no_shards_into(name, f"{type(item).__name__}.step needs a closure")
        tensors: dict[str, torch.Tensor] = {}
        contents.values[f"@plain.{key}"] = _json(flatten_state(_value_of(item, state), key, tensors))
        if is_strategy(item):
            contents.values[STRATEGY + name] = b"true"
        for found in tensors:
            if (other := owners.setdefault(found, name)) != name:
                raise BadInput(
                    f"{other!r} and {name!r} of the state both have a tensor {found!r}", "rename one of them"
                )
        contents.tensors.update(tensors)
        if kept is not item:
            pass  # of one worker
        elif isinstance(item, torch.nn.Module):
            parameters = {_identity(p): p.requires_grad for p in item.parameters()}
            contents.alike.update(found for found, t in tensors.items() if _identity(t) in parameters)
            contents.frozen.update(found for found, t in tensors.items() if not parameters.get(_identity(t), True))
        elif _is_by_parameter(item, state) or is_strategy(item):
            contents.alike.update(tensors)
    generators = rng_state(gpus_of(contents.tensors.values()))
    contents.values[f"@rng.{rank}"] = _json(flatten_state(generators, "rng", {}))
    return contents


def is_strategy(item: object) -> bool:
    """Whether ``item`` is a way of training together (see ``strategies.interface``): what it remembers is the same on
    all ranks, and belongs to the weights beside it."""
    return getattr(item, "is_strategy", False) is True


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What tells whether it is another tensor under another name. Views of one memory that differ in anything else are
    not, on all ranks alike: a shard may begin where a whole tensor does on one of them."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().data_ptr(), tensor.dtype, tensor.shape, tensor.placements
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _value_of(item: Any, state: State) -> Any:
    """What is kept of ``item``: its state dict, or the item itself."""
    if isinstance(item, torch.nn.Module):
        if (bare := _bare(item)) is not None:
            return bare.state_dict()
        # Not strict: a loss, or a layer without weights, has nothing to keep.
        return get_model_state_dict(item, options=StateDictOptions(strict=False))
    if isinstance(item, torch.optim.Optimizer) and (model := _model_of(item, state)):
        with untouched(item):
            return get_optimizer_state_dict(model, item)
    return item.state_dict() if _is_stateful(item) else item


def _bare(model: torch.nn.Module) -> torch.nn.Module | None:
    """``model`` without DDP around it, if nothing within adds to the names in its state dict, or shards it: then those
    are the full names. torch finds that out name by name, which takes 10 ms for 330 of them when they are saved, while
    the training stands, and 20 ms when they are restored."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)) or hasattr(
            type(module), "_fqn_modifiers"
        ):
            return None
        if not WRAPPERS.isdisjoint(module._modules):
            return None
    return model


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
