"""What the ranks of the tests of LocalSGD and DiLoCo run: a linear model, whose gradients NumPy can follow."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from gpuctl import Cast, Checkpointer, Compressed, DiLoCo, First, LocalSGD, Private, TopK
from gpuctl.trainers.exchange.group import GroupExchange
from gpuctl.trainers.strategies.outer.local_steps import LocalSteps
from gpuctl.trainers.transport.socket_bytes import SocketBytes

RATE = 0.05
WIDTH, SAMPLES = 5, 4


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, 2).to(dtype)


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    """A worker's own in each step."""
    generator = torch.Generator().manual_seed(step * 64 + worker)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)


def descend(model: nn.Linear, optimizer: Optimizer, place: tuple[int, int]) -> None:
    inputs, targets = batch(*place)
    optimizer.zero_grad()
    mse_loss(model(inputs.to(model.weight.dtype)), targets.to(model.weight.dtype)).backward()
    optimizer.step()


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in model.state_dict().items()}


def trained(method: LocalSteps, steps: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    """The weights after each boundary."""
    model = net(dtype=dtype)
    optimizer = SGD(model.parameters(), RATE)
    method.attach(model, optimizer)
    found = []
    while method.step < steps:
        descend(model, optimizer, method.place)
        if method.after_step():
            found.append(weights(model))
    if method.finish():
        found.append(weights(model))
    return found


def by_the_paper(
    workers: int, every: int, steps: int, rate: float, momentum: float, warmup: int = 0
) -> list[dict[str, Any]]:
    """Algorithm 1 of arXiv:2311.08105 in NumPy, with SGD as the inner optimizer."""
    start = weights(net())
    theta = {name: start[name].copy() for name in start}
    b = {name: np.zeros_like(start[name]) for name in start}
    found, step = [], 0
    while step < steps:
        length = 1 if step < warmup else min(every, steps - step)
        deltas = []
        for worker in range(workers):
            w, c = theta["weight"].copy(), theta["bias"].copy()
            for h in range(length):
                inputs, targets = (x.numpy() for x in batch(step + h, worker))
                error = 2 * (inputs @ w.T + c - targets) / targets.size
                w, c = w - RATE * error.T @ inputs, c - RATE * error.sum(0)
            deltas.append({"weight": theta["weight"] - w, "bias": theta["bias"] - c})
        for name in theta:
            delta = sum(one[name] for one in deltas) / workers
            if step < warmup:
                theta[name] = theta[name] - delta
            else:
                b[name] = momentum * b[name] + delta
                theta[name] = theta[name] - rate * (delta + momentum * b[name])
        step += length
        found.append({name: theta[name].copy() for name in theta})
    return found


def exactly(steps: int) -> dict[str, Any]:
    """Synchronous SGD, by DDP."""
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), RATE)
    for step in range(steps):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def bytes_sent(method: LocalSteps, steps: int, size: int) -> tuple[int, int]:
    """What this rank has sent in ``steps`` steps of a model of ``size`` parameters, and in a dense all-reduce each."""
    model = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(model.weight)
    method.attach(model)
    sockets = SocketBytes()
    before = _sent(sockets)
    for _ in range(steps):
        with torch.no_grad():
            model.weight += 0.01
        method.after_step()
    ours = _sent(sockets) - before
    before = _sent(sockets)
    for _ in range(steps):
        dist.all_reduce(torch.zeros(size))
    return ours, _sent(sockets) - before


def _sent(sockets: SocketBytes) -> int:
    dist.barrier()  # else some of it may still wait in a socket
    found = sockets.read().sent
    dist.barrier()  # else who is done closes its connections, and what they carried since the last read is not known
    return found


def by_speed(method: LocalSteps, seconds: list[float], steps: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """A worker's steps, which take ``seconds`` each by its own clock: at each boundary the step, and where in the data
    its steps were."""
    at = 0.0
    method._clock = lambda: at
    model = net()
    optimizer = SGD(model.parameters(), RATE)
    method.attach(model, optimizer)
    found = []
    taken: list[tuple[int, int]] = []
    for place in method.steps(steps):
        taken.append(place)
        descend(model, optimizer, place)
        at += seconds[dist.get_rank()]
        if method.after_step():
            found.append((method.step, taken))
            taken = []
            at += 100.0 * dist.get_rank()  # what it does at a boundary is not a step
    return found


def unlike_weights(weights_of: list[float]) -> Any:
    """The mean of ones times a rank's number, weighted."""
    rank = dist.get_rank()
    mean = GroupExchange().mean(
        [torch.full((3,), float(rank)), torch.full((2, 2), float(rank), dtype=torch.float64)],
        [torch.full((1,), float(rank), dtype=torch.float64)],
        weight=weights_of[rank],
        told=[rank, 0.5],
        seed=0,
    )
    return [x.tolist() for x in (*mean.tensors, *mean.exact)], mean.told


def unlike_models(how: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    if rank == 1 and how == "values":
        with torch.no_grad():
            layers[1].weight[0, 0] += 1e-6
    if rank == 1 and how == "names":
        layers.pop()
    LocalSGD(4).attach(nn.Sequential(*layers))


def a_stop(method: LocalSteps, folder: str, asked: list[int], steps: int) -> Any:
    """A rank that is in ``asked`` gets its notice in its third step after the first boundary."""
    model = net()
    optimizer = SGD(model.parameters(), RATE)
    checkpointer = Checkpointer(folder, every=1)
    method.attach(model, optimizer)
    state = {"model": model, "optimizer": First(optimizer), "method": method}
    checkpointer.restore(state)
    lengths = []
    made = 0
    while method.step < steps:
        descend(model, optimizer, method.place)
        made += 1
        if method.step == method.every + 2 and dist.get_rank() in asked:
            os.kill(os.getpid(), signal.SIGTERM)
        if method.after_step():
            lengths.append(made)
            made = 0
            Path(folder, f"last.{dist.get_rank()}").write_text(str(method.step))
            checkpointer.step(method.step, state)
    checkpointer.wait()
    return lengths, weights(model)


def saved_at(method: LocalSteps, folder: str, steps: int, save_at: int, keep: Callable[[Optimizer], Any]) -> None:
    """Saves after ``save_at`` steps, whatever the method says."""
    model = net()
    optimizer = AdamW(model.parameters(), RATE)
    checkpointer = Checkpointer(folder)
    method.attach(model, optimizer)
    state = {"model": model, "optimizer": keep(optimizer), "method": method}
    for step in range(steps):
        descend(model, optimizer, (step, dist.get_rank()))
        method.after_step()
        if step + 1 == save_at:
            checkpointer.save(step + 1, state)
            checkpointer.wait()


def resumed(
    method: LocalSteps, folder: str, keep: Callable[[Optimizer], Any], until: int
) -> tuple[int, dict[str, Any], dict[int, Any], dict[str, Any]]:
    """The step that was restored, and then: the weights, the optimizer's first moment, and the method's state; trained
    on until step ``until``, the weights of that."""
    model = net(seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
    optimizer = AdamW(model.parameters(), RATE)
    method.attach(model, optimizer)
    step = Checkpointer(folder).restore({"method": method, "model": model, "optimizer": keep(optimizer)})
    at, moments = weights(model), {}
    if optimizer.state:
        moments = {index: optimizer.state[p]["exp_avg"].numpy().copy() for index, p in enumerate(model.parameters())}
    while method.step < until:
        descend(model, optimizer, method.place)
        method.after_step()
    return step or 0, at, moments, weights(model)


def through(method: LocalSteps, until: int) -> dict[str, Any]:
    """The weights of an undisturbed run with AdamW."""
    model = net()
    optimizer = AdamW(model.parameters(), RATE)
    method.attach(model, optimizer)
    while method.step < until:
        descend(model, optimizer, method.place)
        method.after_step()
    return weights(model)


def moments(steps: int) -> list[Any]:
    """AdamW's first moments on each worker after ``steps`` steps of its own."""
    model = net()
    optimizer = AdamW(model.parameters(), RATE)
    for step in range(steps):
        descend(model, optimizer, (step, dist.get_rank()))
    return [optimizer.state[p]["exp_avg"].numpy().copy() for p in model.parameters()]


def plainly(folder: str, extra: bool) -> int | None:
    """Restore into the state of a plain loop."""
    model = net()
    state: dict[str, Any] = {"model": model}
    if extra:
        state["optimizer"] = AdamW(model.parameters(), RATE)
    return Checkpointer(folder).restore(state)


def incomplete(what: str, folder: str) -> None:
    """States from which a part of what differs is missing, or not marked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = AdamW(model.parameters(), RATE)
    method = LocalSGD(4).attach(model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": First(optimizer), "method": method}
    if what == "a part":
        state = {"part": model[0]}
    if what == "no method":
        del state["method"]
    if what == "bare optimizer":
        state["optimizer"] = optimizer
    if what == "bare average":
        state["average"] = copy.deepcopy(model)
    checkpointer = Checkpointer(folder)
    checkpointer.save(0, state)


def plain_checkpoint(folder: str) -> None:
    """One of a run without any method, of three steps."""
    model = net()
    optimizer = AdamW(model.parameters(), RATE)
    for step in range(3):
        descend(model, optimizer, (step, 0))
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, {"model": model, "optimizer": optimizer})
    checkpointer.wait()


def with_batch_norm(steps: int) -> dict[str, Any]:
    """A layer with averages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)).double()
    optimizer = SGD(model.parameters(), RATE)
    method = LocalSGD(steps).attach(model, optimizer)
    alone: dict[str, Any] = {}
    for step in range(steps):
        inputs, _ = batch(step, dist.get_rank())
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        alone = weights(model)
        method.after_step()
    return {"alone": alone, "together": weights(model)}


def with_other_buffers() -> list[Any]:
    """Buffers before and after a boundary, those of the second rank are larger."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    model.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
    model.register_buffer("large", torch.tensor([2**53 + 1, 2**62 + 12345]))
    model.register_buffer("average", torch.full((2,), float(dist.get_rank())))
    method = LocalSGD(1).attach(model)
    before = [buffer.tolist() for buffer in model.buffers()]
    method.after_step()
    return [before, [buffer.tolist() for buffer in model.buffers()]]


def learned_once(steps: int) -> list[float]:
    """A weight in bfloat16 that learns in the first of ``steps`` outer steps, and nothing after it: θ each time."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    method = DiLoCo(every=1, rate=0.35, momentum=0.0).attach(model)
    found = []
    for step in range(steps):
        if step == 0:
            with torch.no_grad():
                model.weight -= 2**-7
        method.after_step()
        found.append(float(method.state_dict()["weights"]["weight"]))
    return found


def complex_mean() -> list[complex]:
    model = nn.ParameterDict({"z": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    method = LocalSGD(1, codec=Cast("bf16")).attach(model)
    with torch.no_grad():
        model["z"] += complex(1, 2 * dist.get_rank())
    method.after_step()
    found: list[complex] = model["z"].tolist()
    return found


def replaced() -> None:
    model = net()
    method = LocalSGD(1).attach(model)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    method.after_step()


def two_methods(steps: int) -> tuple[int, int]:
    """The second rank gets a notice between the two."""
    listening = Checkpointer(str(Path(os.environ["TEST_FOLDER"], "none")))
    one, other = LocalSGD(5).attach(net()), LocalSGD(5).attach(net(1))
    for step in range(steps):
        one.after_step()
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        other.after_step()
    assert listening.on
    return one.step, other.step


def frozen_later() -> None:
    first = nn.Linear(2, 2)
    first.weight.requires_grad_(False)
    method = LocalSGD(1).attach(nn.Sequential(first, nn.Linear(2, 2)))
    first.weight.requires_grad_(True)
    method.after_step()


def both(method: LocalSteps) -> None:
    model = DistributedDataParallel(net())
    Compressed(TopK(0.5)).attach(model)
    method.attach(model)


KEEPERS: dict[str, Callable[[Optimizer], Any]] = {"first": First, "each": Private}
