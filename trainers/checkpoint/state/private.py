"""What of a state is another one on each worker, where workers train apart between outer steps (LocalSGD, DiLoCo).

``Checkpointer`` takes parameters and optimizers for the same on all ranks, and has each rank write a part of them. Of
those that differ that would make a patchwork: so here is how they are told apart, and what is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gpuctl.cluster.errors import BadInput

_PRIVATE = "private."


class First:
    """An optimizer, or an average of weights, of which a checkpoint keeps the first worker's, for all to go on from::

        state = {"model": model, "optimizer": First(optimizer), "diloco": diloco}

    It is the one of a worker, whole. Takes as much room as without workers that train apart, and fits any number of
    them. Raises ``BadInput`` for what has no state.
    """

    def __init__(self, item: Any) -> None:
        self.item = _with_state(self, item)

    def __repr__(self) -> str:
        return f"First({type(self.item).__name__})"


class Private:
    """An optimizer, or another object with a state, of which a checkpoint keeps that of each worker.

    Each worker goes on from its own; one that the checkpoint's world did not have, from the first one's. Raises
    ``BadInput`` for what has no state.
    """

    def __init__(self, item: Any) -> None:
        self.item = _with_state(self, item)

    def __repr__(self) -> str:
        return f"Private({type(self.item).__name__})"


def bare(item: Any) -> Any:
    """What is kept, without ``First`` or ``Private`` around it."""
    return item.item if isinstance(item, First | Private) else item


def key_of(name: str, item: Any, rank: int) -> str:
    """What ``item``, which is called ``name`` in the state of ``rank``, is called in a checkpoint."""
    return f"{_PRIVATE}{rank}.{name}" if isinstance(item, Private) else name


def keys_of(name: str, item: Any, rank: int) -> list[str]:
    """Where ``rank`` finds ``item``, the best first."""
    return [key_of(name, item, rank), key_of(name, item, 0)]


def shown(key: str) -> str:
    """A key of ``key_of``, as messages have it."""
    if key.startswith(_PRIVATE):
        return f"Private {key.split('.', 2)[2]!r}"
    return repr(key)


_METHODS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def trains_apart(model: nn.Module, method: Any) -> None:
    """Note that ``model`` is another one on each worker, but where ``method`` says so: its ``state_dict`` raises where
    it is not the same. From now on a state that has ``model`` must have ``method``, too."""
    for module in model.modules():
        _METHODS[module] = weakref.ref(method)


def method_of(model: nn.Module) -> Any | None:
    """The method that trains ``model``, a part of it or what it is a part of, apart."""
    for module in model.modules() if _METHODS else ():
        if module in _METHODS and (method := _METHODS[module]()) is not None:
            return method
    return None


def is_alone(method: Any) -> bool:
    """Whether no other method of this process trains a model apart."""
    return all(other() in (None, method) for other in _METHODS.values())


def check_not_mixed(state: Mapping[str, Any]) -> None:
    """Raises ``BadInput`` for a state of which ranks would write parts that do not belong together."""
    methods = {name: method_of(bare(item)) for name, item in state.items() if isinstance(bare(item), nn.Module)}
    for name, method in methods.items():
        if method is not None and not any(item is method for item in state.values()):
            raise BadInput(
                f"{name!r} of the state is trained by {method!r}, which the state lacks",
                "add it, since workers hold the same weights only where it says so; or load weights before attach()",
            )
    method = next((one for one in methods.values() if one is not None), None)
    if method is None:
        return
    for name, item in state.items():
        if isinstance(item, Optimizer) or (isinstance(item, nn.Module) and methods[name] is None and item.state_dict()):
            raise BadInput(
                f"{name!r} of the state may be another one on each worker, since {method!r} trains them apart",
                f"keep First({name}), the first worker's, or Private({name}), that of each",
            )


def _with_state(keeper: object, item: Any) -> Any:
    if getattr(item, "is_strategy", False):
        raise BadInput(f"{item!r} is the same on all workers", f"keep it without {type(keeper).__name__}")
    if callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)):
        return item
    raise BadInput(
        f"{type(keeper).__name__}({item!r}) has no state to keep", "give an object with state_dict and load_state_dict"
    )
