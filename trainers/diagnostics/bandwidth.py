"""How long an all-reduce takes, as nccl-tests measures it, and in which order pairs of nodes are measured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gpuctl.cluster.network.verification import AllReduceResult
from gpuctl.trainers.diagnostics.burn_in import wait

_SERIES, _SERIES_S = 3, 0.5
_MOST = 20
"""All-reduces of a series."""

Match = tuple[int, int]
"""Two nodes, by rank."""


def schedule(nodes: int, together: bool) -> list[list[Match]]:
    """All pairs of ``nodes``, in turns. ``together``: as many as share no node at once, as in a tournament."""
    if not together:
        return [[match] for match in itertools.combinations(range(nodes), 2)]
    places: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    turns = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        matches = zip(places[:half], reversed(places[half:]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return turns


def measure(
    group: dist.ProcessGroup | None, nodes: Sequence[str], ranks: int, size: int, device: torch.device
) -> AllReduceResult:
    """An all-reduce of ``size`` bytes of float32 among the ``ranks`` of ``group``, all of which call this. The time is
    the best of a few series, by the slowest rank's clock."""
    mark = torch.ones(max(1, size // 4), device=device)
    try:
        wrong = not _adds_up(mark, group, ranks)
        mark.zero_()  # so that sums of sums stay numbers
        once_s = _agreed(_series(mark, group, 1, device), group, device)
        count = max(1, min(_MOST, int(_SERIES_S / once_s)))
        tries = _SERIES if once_s * count < 2 * _SERIES_S else 1
        best_s = min([_agreed(_series(mark, group, count, device), group, device) for _ in range(tries)])
        mark.fill_(1)
        wrong = wrong or not _adds_up(mark, group, ranks)
    except RuntimeError as error:
        return AllReduceResult(nodes=tuple(nodes), ranks=ranks, bytes=size, trouble=str(error).splitlines()[0][:300])
    return AllReduceResult(nodes=tuple(nodes), ranks=ranks, bytes=mark.numel() * 4, seconds=best_s, wrong=wrong)


def _adds_up(ones: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> bool:
    dist.all_reduce(ones, group=group)
    return bool((ones == ranks).all())


def _series(tensor: torch.Tensor, group: dist.ProcessGroup | None, count: int, device: torch.device) -> float:
    """Seconds of one of ``count`` all-reduces."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor, group=group)
    wait(device)
    return (time.perf_counter() - began) / count


def _agreed(seconds: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The longest of all ranks': they must go on alike."""
    told = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return float(told)
