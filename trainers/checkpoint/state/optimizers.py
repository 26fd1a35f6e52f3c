"""What is asked of an optimizer before its state is read or loaded, and how it is left as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters, in the order in which its ``state_dict`` numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_sharded(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for p in parameters_of(optimizer))


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether its ``step`` says that it takes one (LBFGS). Others only raise without (SAM)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def why_no_state(optimizer: Optimizer) -> str:
    """Why an optimizer to load into lacks its state; empty if it has it. Where there is none torch makes it up by a
    step that changes nothing else. It cannot if no step is made without a closure; then all is as it was."""
    step = f"{type(optimizer).__name__}.step"
    if wants_closure(optimizer):
        return f"{step} needs a closure"
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    with _grads_aside(optimizer):
        try:
            _init_optim_state(optimizer)
        except Exception as error:  # noqa: BLE001 - an optimizer complains as it likes
            optimizer.state.clear()
            for group, rate in rates:
                group["lr"] = rate
            return f"{step} without a closure raises {error!r}"
    return ""


@contextmanager
def untouched(optimizer: Optimizer) -> Iterator[None]:
    """Reading an optimizer's state must not change it, and replacing it nothing else. torch makes up the state of one
    that has made no step, by a step that stays counted (``_init_optim_state``), unless it finds a gradient: so here is
    one."""
    parameters = parameters_of(optimizer)
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
def _grads_aside(optimizer: Optimizer) -> Iterator[None]:
    """torch makes up no state where there is a gradient."""
    parameters = parameters_of(optimizer)
    grads = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
