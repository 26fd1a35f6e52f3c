"""Final weights after losing and regaining nodes, beside those of an undisturbed run on as many nodes."""

from __future__ import annotations

from pathlib import Path

import torch

from gpuctl.cluster.records.rounds import Round
from tests.bench.ours import LocalCluster, local_cluster
from tests.bench.settings import Settings
from tests.bench.table import Row
from tests.waiting import until

_SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
_STEPS = 800
_EVERY = 50


def bitwise(settings: Settings) -> Row:
    """``examples/digits.py`` on three nodes: rank 0's is killed and replaced, then another one is lost with notice."""
    calm, rough = settings.root / "calm.pt", settings.root / "rough.pt"
    with local_cluster(settings.root, (3, 3)) as cluster:
        cluster.outcome(_submit(cluster, settings, calm))
        job = _submit(cluster, settings, rough)
        _wait_for_step(cluster, job, _STEPS // 4, number=1)
        cluster.preempt(cluster.rank0(), notice_s=0.0, replace_after_s=0.0)
        again = _next_round(cluster, job, after=1)
        _wait_for_step(cluster, job, _STEPS // 2, again.number)
        rank0 = cluster.rank0()
        other = next(member.node for member in again.members if member.node != rank0)
        cluster.preempt(other, notice_s=20.0, replace_after_s=0.0)
        third = _next_round(cluster, job, again.number)
        outcome = cluster.outcome(job)
    bytes_, of = _differing(calm, rough)
    met = bytes_ == 0 and outcome.result == "succeeded"
    note = f"of {of} bytes; nodes lost before rounds {again.number} and {third.number}; {_STEPS} steps"
    return Row("bitwise", bytes_, None, "differing bytes", "0", met, note)


def _submit(cluster: LocalCluster, settings: Settings, out: Path) -> str:
    args = ["--steps", str(_STEPS), "--checkpoint-every", str(_EVERY), "--out", str(out)]
    return cluster.submit(_SCRIPT, args, settings.root)


def _wait_for_step(cluster: LocalCluster, job: str, step: int, number: int) -> None:
    until(lambda: cluster.step(job, number) >= step, f"step {step} of {job}", 120.0)


def _next_round(cluster: LocalCluster, job: str, after: int) -> Round:
    def newer() -> Round | None:
        now = cluster.wait_for_world(job, 3)
        return now if now.number > after else None

    return until(newer, f"three nodes again after round {after}")


def _differing(one: Path, other: Path) -> tuple[int, int]:
    """(bytes that differ, bytes compared)"""
    a, b = torch.load(one), torch.load(other)
    if a.keys() != b.keys():
        raise ValueError("these are weights of two different models")
    pairs = [(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a]
    return sum(int((x != y).sum()) for x, y in pairs), sum(x.numel() for x, _ in pairs)
