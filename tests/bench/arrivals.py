"""A replacement arrives 5 s after a kill, and another node joins: how long does training stand still?"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from tests.bench.losses import EVERY
from tests.bench.ours import LocalCluster, local_cluster
from tests.bench.settings import Settings
from tests.bench.steplog import Mark, StepLog
from tests.bench.table import Row
from tests.bench.torchrun import SCRIPT, Torchrun, attempted, torchrun
from tests.waiting import TookTooLong, until

BAR_S = 2.0
AFTER_S = 5.0


def absorb(settings: Settings) -> Row:
    """Each run: three nodes, one killed; its replacement 5 s later; then another node."""
    replaced: list[float] = []
    joined: list[float] = []
    trouble = ""
    with local_cluster(settings.root, (2, 4)) as cluster:
        log = StepLog(cluster.nodes_dir.parent / "steps")
        cluster.preempt(cluster.rank0(), notice_s=0.0)
        job = cluster.submit(SCRIPT, ["--marks", str(log.path), "--every", str(EVERY)], settings.root)
        try:
            for run in range(settings.runs):
                log.wait_for_steady(3)
                replaced.append(_replacement(cluster, log, rank0=run % 2 == 1))
                joined.append(_newcomer(cluster, log))
                cluster.preempt(_another(cluster), notice_s=30.0)
        except TookTooLong as error:
            trouble = f"; {error}"
        cluster.end(job)
    stalls = replaced + joined
    within, wanted = sum(stall <= BAR_S for stall in stalls), 2 * settings.runs
    ours = f"{within} of {wanted}, worst {max(stalls, default=0):.2f} s"
    reference = None if settings.fast else _torchrun(settings.root)
    note = (
        f"median stall of a replacement {median(replaced or [0]):.2f} s, of another node {median(joined or [0]):.2f} s"
    )
    return Row("absorb_join", ours, reference, "joins", f"all <= {BAR_S:g} s", within == wanted, note + trouble)


def _replacement(cluster: LocalCluster, log: StepLog, *, rank0: bool) -> float:
    """Kill a node of three and have another one in its place 5 s later; seconds of stall when it comes."""
    began = time.monotonic()
    cluster.preempt(cluster.rank0() if rank0 else _another(cluster), notice_s=0.0, replace_after_s=AFTER_S)
    return _stall(log, since=began + AFTER_S, world=3)


def _newcomer(cluster: LocalCluster, log: StepLog) -> float:
    began = time.monotonic()
    cluster.up()
    return _stall(log, since=began, world=4)


def _stall(log: StepLog, since: float, world: int) -> float:
    """The longest time without a step until ``world`` workers train, beyond that of a usual step."""
    log.wait_for_steady(world)
    now = time.monotonic()
    return max(0.0, log.longest_gap(since, now) - log.step_time(since, now))


def _another(cluster: LocalCluster) -> str:
    """A live node that is not rank 0's."""
    rank0 = cluster.rank0()
    return next(name for name in sorted(cluster.records()) if name != rank0 and not cluster.is_taken(name))


def _torchrun(root: Path) -> str:
    joins = attempted(lambda: _torchrun_joined(root, [0, 1], killed=None))
    replaced = attempted(lambda: _torchrun_joined(root, [0, 1, 2], killed=2))
    return f"join: {joins}; replacement: {replaced}"


def _torchrun_joined(root: Path, nodes: list[int], killed: int | None) -> str:
    with torchrun(root, nodes) as job:
        old = job.log.pids()
        at = time.monotonic()
        if killed is not None:
            at = job.kill(killed)
            until(lambda: time.monotonic() - at > AFTER_S, "the replacement")
        came = time.monotonic()
        job.start(3)
        found = until(lambda: _outcome(job, old), "torchrun with a node that joins", patience_s=180.0)
        if isinstance(found, Mark):
            return f"{job.log.longest_gap(at, found.at):.1f} s of stall"
        return f"whole job died after {time.monotonic() - came:.0f} s"


def _outcome(job: Torchrun, old: set[int]) -> Mark | dict[int, int] | None:
    three = (m for m in job.log.steps() if m.pid not in old and m.world == 3)
    return next(three, None) or job.exit_codes()
