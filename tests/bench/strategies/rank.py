"""One rank of a measurement: steps of a transformer, and what its sockets have carried. Prints one line of JSON.

    python -m tests.bench.strategies.rank step STRATEGY STEPS WINDOWS [TRACE]
    python -m tests.bench.strategies.rank pairs STRATEGY BLOCKS
    python -m tests.bench.strategies.rank apart STRATEGY OUTER_STEPS

``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` as a launcher sets them. Besides what ``--strategy``
takes, ``STRATEGY`` may be ``compute`` (nothing is exchanged), ``network`` (gradients are exchanged, and nothing is
computed) and ``document`` (an asynchronous all-reduce of each parameter after backward, as it is often taught).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from examples.charlm import CONTEXT, CharLM
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gpuctl.cluster.jobs.strategy import parse
from gpuctl.trainers import gloo_exit
from gpuctl.trainers.strategies.named import named
from gpuctl.trainers.strategies.outer.local_steps import LocalSteps
from gpuctl.trainers.transport.socket_bytes import SocketBytes
from tests.bench.strategies.bare import BARE

BUCKET_MB = 4.0
"""Of 16 MB of gradients, so that several buckets travel."""
WINDOWS = 2
"""Of text, that each rank computes in a step."""
BLOCK = 5
"""Steps of one side of a pair."""


def transformer() -> nn.Module:
    """4.1 million parameters, in layers without biases, as large models have them."""
    torch.manual_seed(0)
    model = CharLM(width=256, heads=4, layers=5)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True, bias=False)
    model.blocks = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
    return model


def wrapped(strategy: str, is_bare: bool = False) -> nn.Module:
    model = transformer()
    if strategy in ("compute", "network", "document"):
        return model
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, forward_sync_buffers=False)
    if is_bare:
        BARE[strategy](ddp)
    elif strategy != "exact":
        named(parse(strategy)).attach(ddp)
    return ddp


def stepper(model: nn.Module, strategy: str, windows: int = WINDOWS) -> Callable[[], None]:
    """One step on the same text."""
    if strategy == "network":
        return exchange_only(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(0, 256, (windows, CONTEXT + 1), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        if strategy == "document":
            handles = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for handle in handles:
                handle.wait()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= dist.get_world_size()
        optimizer.step()

    return step


def exchange_only(model: nn.Module) -> Callable[[], None]:
    """As many bytes as the gradients have, in pieces like DDP's buckets, one after the other."""
    left = sum(p.numel() for p in model.parameters())
    most = int(BUCKET_MB * 2**20 / 4)
    pieces = [torch.zeros(min(most, left - begin)) for begin in range(0, left, most)]

    def step() -> None:
        for piece in pieces:
            dist.all_reduce(piece)

    return step


def steps(strategy: str, count: int, windows: int, trace: str = "") -> dict[str, Any]:
    """Seconds of each step, after two that are not counted, and bytes sent in all of those."""
    step = stepper(wrapped(strategy), strategy, windows)
    for _ in range(2):
        step()
    sockets, seconds = SocketBytes(), []
    dist.barrier()
    before = sockets.read()
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    dist.barrier()  # else some of it may still wait in a socket
    sent = (sockets.read() - before).sent
    if trace:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        if dist.get_rank() == 0:
            profile.export_chrome_trace(trace)
    return {"seconds": seconds, "sent": sent / count}


def pairs(strategy: str, blocks: int) -> dict[str, Any]:
    """Seconds of blocks of steps in turns: the frame's, by hand."""
    sides = [stepper(wrapped(strategy, is_bare), strategy) for is_bare in (False, True)]
    found = []
    for block in range(blocks + 1):
        took = []
        for step in sides:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(BLOCK):
                step()
            took.append(time.perf_counter() - began)
        if block:  # the first ones lay out buckets
            found.append(took)
    return {"pairs": found}


def apart(strategy: str, count: int) -> dict[str, Any]:
    """Seconds of each outer step, after one that is not counted, and bytes sent in one."""
    model = transformer()
    outer = named(parse(strategy))
    assert isinstance(outer, LocalSteps)
    outer.attach(model)
    step = stepper(model, strategy)
    sockets, seconds, sent = SocketBytes(), [], 0
    for turn in range(count + 1):
        dist.barrier()
        before, began = sockets.read().sent, time.perf_counter()
        while True:
            step()
            if outer.after_step():
                break
        took = time.perf_counter() - began
        dist.barrier()
        if turn:
            seconds.append(took)
            sent += sockets.read().sent - before
    return {"seconds": seconds, "sent": sent / count}


def main(mode: str, strategy: str, count: str, *rest: str) -> None:
    torch.set_num_threads(1)
    gloo_exit.install()
    dist.init_process_group("gloo")
    match mode:
        case "step":
            told = steps(strategy, int(count), int(rest[0]), *rest[1:])
        case "pairs":
            told = pairs(strategy, int(count))
        case _:
            told = apart(strategy, int(count))
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
