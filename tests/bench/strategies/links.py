"""Seconds of a step, and bytes of one, over wires whose rate is limited."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from gpuctl import TopK
from tests.bench.network import Network
from tests.bench.settings import Settings
from tests.bench.strategies import launch
from tests.bench.strategies.rank import WINDOWS, transformer
from tests.bench.table import Row

RANK = "tests.bench.strategies.rank"
TOP_K, POWER_SGD = "topk:ratio=0.01", "powersgd:rank=4"
METHODS = ("exact", "bf16", "int8", TOP_K, POWER_SGD, "dgc")
UTILISATIONS = (0.01, 0.05, 0.2)
"""How much of its time DDP computes, on each link."""
_PAYLOAD = 0.956
_IMPLIED = 2.2
_MORE = 24


@dataclass(frozen=True, slots=True)
class Link:
    """A rate at which DDP's steps are as long as they should be."""

    mbit: float
    compute_s: float
    ddp_s: float


def sent_bytes(_: Settings) -> list[Row]:
    """What each rank sends in a step, by its sockets, beside the exact mean."""
    with launch.machines() as net:
        sent = {method: step(net, method, 3)["sent"] / 1e6 for method in METHODS}
    matrices, others = values()
    # (N-1) × the encoded matrices, over 2(N-1)/N × all values; and what is sent dense.
    implied = sum(map(TopK(0.01).wire_bytes, matrices)) / (4 * sum(matrices) + 4 * others)
    rows = [
        Row(f"bytes_{short(method)}", sent[method], sent["exact"], "MB a step", "", None)
        for method in METHODS
        if method not in ("exact", TOP_K)
    ]
    ratio = sent[TOP_K] / sent["exact"]
    dense = others / (sum(matrices) + others)
    note = (
        f"density and index width imply {implied:.5f} of the dense bytes, of which {ratio / implied:.2f} times as many "
        f"were sent; {dense:.2%} of the values are in no matrix, and exact"
    )
    most = implied * _IMPLIED
    return [Row("bytes_topk", sent[TOP_K], sent["exact"], "MB a step", f"<= {most:.4f} x", ratio <= most, note), *rows]


def overlap(_: Settings) -> list[Row]:
    """On links where the network alone takes half as long as computing alone, and as long. With more to compute than
    elsewhere: ranks share cores here, and what is sent fast takes them from what is computed."""
    with launch.machines() as net:
        compute = float(median(step(net, "compute", 5, windows=_MORE)["seconds"]))
        return [row for part in (0.5, 1.0) for row in _overlap(net, compute, part)]


def _overlap(net: Network, compute: float, part: float) -> list[Row]:
    """Forward, a third of a step, hides nothing: no gradient is there yet."""
    trace = str(launch.ROOT / "build" / "bench-strategies-trace.json")
    _shape(net, _mbit_for(compute * part))
    network = median(step(net, "network", 5)["seconds"])
    least, most = max(compute, network), compute + network
    rows = []
    for how, name in (("exact", "overlap_ddp"), ("document", "overlap_document")):
        took = median(step(net, how, 5, *([trace] if how == "exact" else []), windows=_MORE)["seconds"])
        hidden = (most - took) / (most - least)
        bar, met = (">= 0.5", hidden >= 0.5) if how == "exact" else ("", None)
        note = (
            f"{took:.3f} s a step, of {least:.3f} (all hidden) to {most:.3f} (nothing): {compute:.3f} s of computing, "
            f"{network:.3f} s of the network; {trace} shows a step"
        )
        rows.append(Row(f"{name}_{part:g}", round(hidden, 3), None, "of the shorter one", bar, met, note))
    return rows


def links(settings: Settings) -> list[Row]:
    """Each method where DDP computes a given part of its time."""
    rows = []
    with launch.machines() as net:
        for utilisation in (0.2,) if settings.fast else UTILISATIONS:
            link = link_of(net, utilisation)
            for method in METHODS:
                count = 3 if method == "exact" else 5
                took = link.ddp_s if method == "exact" else median(step(net, method, count)["seconds"])
                note = f"{link.mbit:.1f} Mbit/s; utilisation {link.compute_s / took:.1%}"
                rows.append(Row(f"step_{utilisation:g}_{short(method)}", took, link.ddp_s, "s", "", None, note))
    return rows


def link_of(net: Network, utilisation: float) -> Link:
    """Find the rate, first by DDP's bytes and then by its steps."""
    for machine in range(launch.RANKS):
        net.shape(machine, 10_000)
    compute = median(step(net, "compute", 10)["seconds"])
    wanted = compute / utilisation
    mbit = _mbit_for(wanted - compute)
    for _ in range(2):
        _shape(net, mbit)
        took = median(step(net, "exact", 3)["seconds"])
        if abs(took / wanted - 1) < 0.1:
            break
        mbit *= max(0.2, (took - compute) / (wanted - compute))
    return Link(mbit, compute, took)


def step_s(net: Network, method: str) -> float:
    """Median of five steps."""
    return float(median(step(net, method, 5)["seconds"]))


def apart(net: Network, method: str, count: int) -> dict[str, Any]:
    """Seconds of ``count`` outer steps, and the bytes of one."""
    told: dict[str, Any] = launch.ranks(net, RANK, "apart", method, str(count))
    return told


def values() -> tuple[list[int], int]:
    """Of the transformer: the sizes of its matrices, and how many values are in no matrix."""
    parameters = list(transformer().parameters())
    return [p.numel() for p in parameters if p.dim() > 1], sum(p.numel() for p in parameters if p.dim() < 2)


def short(method: str) -> str:
    return method.partition(":")[0]


def _mbit_for(seconds: float) -> float:
    """The rate at which the exact mean of all gradients takes so long."""
    matrices, others = values()
    sent = 2 * (launch.RANKS - 1) / launch.RANKS * 4 * (sum(matrices) + others)
    return sent * 8 / seconds / 1e6 / _PAYLOAD


def _shape(net: Network, mbit: float) -> None:
    for machine in range(launch.RANKS):
        net.shape(machine, mbit)


def step(net: Network, method: str, count: int, *trace: str, windows: int = WINDOWS) -> dict[str, Any]:
    """Seconds of ``count`` steps, and the bytes of one."""
    told: dict[str, Any] = launch.ranks(net, RANK, "step", method, str(count), str(windows), *trace)
    return told
