"""Three nodes, one of them taken: with notice, without, rank 0's or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.bench.ours import LocalCluster, local_cluster
from tests.bench.settings import Settings
from tests.bench.steplog import Mark, StepLog, spread
from tests.bench.table import Row
from tests.bench.torchrun import SCRIPT, attempted, torchrun
from tests.waiting import TookTooLong, until

EVERY = 50
"""Steps between two checkpoints, on both sides."""
BAR_S = 2.0


@dataclass(slots=True)
class Resumes:
    """Seconds from each kill to the survivors' next optimizer step, and where they went."""

    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, killed: float, decided: float, marks: list[Mark], first: Mark) -> None:
        """``marks`` are those of the processes of the next round."""
        self.seconds.append(first.at - killed)
        before = killed
        reached = {what: max(m.at for m in marks if m.what == what) for what in ("begin", "joined", "restored")}
        for what, at in {"decided": decided, **reached, "first step": first.at}.items():
            self.parts.setdefault(what, []).append(at - before)
            before = at

    def note(self) -> str:
        parts = ", ".join(f"{what} +{median(values):.2f}" for what, values in self.parts.items())
        return f"{spread(self.seconds)} in {len(self.seconds)} runs; {parts}"


def notice(settings: Settings) -> Row:
    """Steps made twice because a node was taken with notice."""
    redone: list[int] = []
    with local_cluster(settings.root, (2, 3)) as cluster:
        job, log = _start(cluster, settings.root)
        for run in range(settings.runs):
            log.wait_for_steady(3, steps=EVERY + 7)
            old = log.pids()
            node = cluster.rank0() if run % 2 == 0 else _other_than_rank0(cluster)
            cluster.preempt(node, notice_s=30.0, replace_after_s=None)
            first = until(lambda old=old: log.first_step_of_new(old), "a step after the notice")  # type: ignore[misc]
            last = max(mark.step for mark in log.steps() if mark.pid in old)
            redone.append(last + 1 - first.step)
            cluster.up()
        cluster.end(job)
    bar = "0 steps"
    worst = max(redone)
    return Row(
        "notice_steps_redone", worst, EVERY, "steps", bar, worst == 0, f"worst of {len(redone)}, half of them rank 0's"
    )


def kill_rank0(settings: Settings) -> Row:
    ours = _resumes(settings, LocalCluster.rank0)
    reference = None if settings.fast else attempted(lambda: _torchrun_without_rank0(settings.root))
    met = max(ours.seconds) <= BAR_S
    return Row("resume_kill_rank0", median(ours.seconds), reference, "s", f"<= {BAR_S:g} s", met, ours.note())


def kill_other(settings: Settings) -> Row:
    ours = _resumes(settings, _other_than_rank0)
    mine, met, bar = median(ours.seconds), max(ours.seconds) <= BAR_S, f"<= {BAR_S:g} s and <= 0.05 x"
    note = ours.note()
    if settings.fast:
        return Row("resume_kill_other", mine, None, "s", bar, met, note)
    reference = attempted(lambda: _torchrun_without_another(settings.root, tuned=False))
    tuned = attempted(lambda: _torchrun_without_another(settings.root, tuned=True))
    note += f"; torchrun tuned: {tuned:.1f} s" if isinstance(tuned, float) else f"; torchrun tuned: {tuned}"
    met = met and (isinstance(reference, str) or mine <= 0.05 * reference)
    return Row("resume_kill_other", mine, reference, "s", bar, met, note)


# -- ours --------------------------------------------------------------------------------------------------------------


def _start(cluster: LocalCluster, root: Path) -> tuple[str, StepLog]:
    log = StepLog(cluster.nodes_dir.parent / "steps")
    job = cluster.submit(SCRIPT, ["--marks", str(log.path), "--every", str(EVERY)], root)
    return job, log


def _resumes(settings: Settings, choose: Callable[[LocalCluster], str]) -> Resumes:
    found = Resumes()
    with local_cluster(settings.root, (2, 3)) as cluster:
        job, log = _start(cluster, settings.root)
        for _ in range(settings.runs):
            log.wait_for_steady(3)
            old = log.pids()
            killed = cluster.kill(choose(cluster))
            first = until(lambda old=old: log.first_step_of_new(old), "a step after the kill")  # type: ignore[misc]
            new = [mark for mark in log.marks() if mark.pid not in old and mark.round == first.round]
            found.add(killed, cluster.decided_at(job, first.round), new, first)
            cluster.up()
        cluster.end(job)
    return found


def _other_than_rank0(cluster: LocalCluster) -> str:
    rank0 = cluster.rank0()
    return next(name for name in sorted(cluster.records(), reverse=True) if name != rank0)


# -- torchrun ----------------------------------------------------------------------------------------------------------


def _torchrun_without_rank0(root: Path) -> str:
    with torchrun(root, [0, 1, 2]) as job:
        killed = job.kill(0)
        return _next_step(job.log, killed, job.exit_codes, patience_s=60.0)[0]


def _torchrun_without_another(root: Path, *, tuned: bool) -> float | str:
    with torchrun(root, [0, 1, 2], tuned=tuned) as job:
        killed = job.kill(2)
        text, seconds = _next_step(job.log, killed, job.exit_codes, patience_s=150.0)
        return text if seconds is None else seconds


def _next_step(
    log: StepLog, killed: float, exit_codes: Callable[[], dict[int, int] | None], patience_s: float
) -> tuple[str, float | None]:
    """What came of it, in words and in seconds."""
    old = log.pids()

    def news() -> tuple[Mark | None, dict[int, int] | None] | None:
        found = log.first_step_of_new(old), exit_codes()
        return found if any(found) else None

    try:
        step, codes = until(news, "torchrun", patience_s)
    except TookTooLong:
        return f"> {patience_s:g} s", None
    if step:
        return f"{step.at - killed:.1f} s", step.at - killed
    return f"never: survivors exited with {sorted(set((codes or {}).values()))}", None
