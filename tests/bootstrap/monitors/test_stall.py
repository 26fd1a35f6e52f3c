"""When a job counts as stalled, and what rank 0 makes of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from threading import Event

import psutil
import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.monitors.stall import Activity, StallTimer, StallWatch, cpu_seconds
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.membership.rounds import STALLED, Observation, decide
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord, TrainingProgress
from gpuctl.cluster.records.rounds import Member, NodeExit, Round

AFTER_S = 1800.0
Does = Callable[[float], Activity | None]
"""What there is of a job, by the seconds since it began."""


def _stalled_at(
    does: Does, gpu: Callable[[float], float] = lambda _: 0.0, until_s: float = 3 * AFTER_S
) -> float | None:
    now = [0.0]
    stall = StallTimer(AFTER_S, lambda: gpu(now[0]))
    while now[0] < until_s:
        if stall.look(5000.0 + now[0], does(now[0])):
            return now[0]
        now[0] += 10.0
    return None


def _steps(now: float) -> int:
    return int(now / 60)


def test_without_a_step_and_without_work_a_job_is_stalled_after_its_time() -> None:
    assert _stalled_at(lambda _: Activity(2, 7, 100.0)) == pytest.approx(AFTER_S, abs=10)
    hangs_at_600 = _stalled_at(lambda now: Activity(2, min(_steps(now), 10), 3.0))
    assert hangs_at_600 == pytest.approx(AFTER_S + 600, abs=20)


def test_a_job_that_steps_is_not_stalled_however_little_it_does_for_it() -> None:
    assert _stalled_at(lambda now: Activity(2, _steps(now), 3.0)) is None


def test_a_job_whose_gpu_or_cpu_works_is_not_stalled_however_long_its_step_takes() -> None:
    assert _stalled_at(lambda _: Activity(2, None, 0.0), gpu=lambda _: 60.0) is None
    assert _stalled_at(lambda now: Activity(2, None, now)) is None


def test_threads_that_only_look_around_are_no_work() -> None:
    assert _stalled_at(lambda now: Activity(8, 7, 8 * 0.01 * now)) is not None
    assert _stalled_at(lambda now: Activity(8, 7, 8 * 0.2 * now)) is None


def test_a_job_without_steps_is_judged_by_its_work_alone() -> None:
    assert _stalled_at(lambda now: Activity(1, None, min(now, 600.0))) == pytest.approx(AFTER_S + 600, abs=20)


def test_what_has_no_workers_yet_is_not_stalled() -> None:
    assert _stalled_at(lambda _: None) is None
    assert _stalled_at(lambda now: Activity(1, None, 0.0) if now >= 900 else None) == pytest.approx(
        AFTER_S + 900, abs=20
    )


def test_a_moment_of_work_starts_the_time_anew() -> None:
    assert _stalled_at(lambda _: Activity(1, None, 0.0), gpu=lambda now: 50.0 if now == 1200 else 0.0) == pytest.approx(
        AFTER_S + 1200, abs=20
    )


def test_a_worker_that_ends_is_something_that_happens() -> None:
    """What it has used is gone with it, so that the others' work alone would look like less than none."""
    ends_at_900 = _stalled_at(lambda now: Activity(2, 7, 500.0) if now < 900 else Activity(1, 7, 200.0))
    assert ends_at_900 == pytest.approx(AFTER_S + 900, abs=20)


def test_gpus_are_asked_only_where_nothing_else_goes_on() -> None:
    def asked() -> float:
        raise AssertionError

    stall = StallTimer(AFTER_S, asked)
    for now in range(0, 600, 10):
        assert not stall.look(now, Activity(1, now, 0.0))


def test_the_cpu_time_of_workers_is_that_of_all_they_start() -> None:
    spin = "import subprocess,sys,time; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", spin]) as worker:
        try:
            deadline = time.monotonic() + 30
            while cpu_seconds([worker.pid]) < 0.5:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            for child in psutil.Process(worker.pid).children():
                child.kill()
            worker.kill()
    assert cpu_seconds([worker.pid]) == 0.0


class _Hangs:
    def activity(self) -> Activity:
        return Activity(1, 3, 0.0)


def test_the_watch_says_so_once_and_wakes_the_agent() -> None:
    said: list[str] = []
    woken = Event()
    watch = StallWatch(_Hangs(), 0.2, SystemClock(), woken.set, said.append)
    watch.start()
    try:
        assert woken.wait(20) and watch.stalled
        assert said == ["stalled: no step and no work for 0.00333333 minutes"]
    finally:
        watch.stop()


def test_after_zero_minutes_nothing_counts_as_stalled_and_its_time_is_measured_all_the_same() -> None:
    stall = StallTimer(0.0, lambda: 0.0)
    assert [stall.look(now, Activity(1, 3, 0.0)) for now in (5.0, 15.0, 3600.0)] == [False] * 3
    assert stall.still_s == 3595.0
    assert not stall.look(3610.0, Activity(1, 4, 0.0)) and stall.still_s == 0.0


# -- rank 0 -----------------------------------------------------------------------------------------------------------

JOB = JobSpec(job="j-1", number=1, script="x.py", code="c", nodes_min=1, nodes_max=2, max_restarts=3)
NODES = ("a", "b")
RUNNING = Round(
    job="j-1",
    number=4,
    phase="run",
    epoch=1,
    members=tuple(Member(node=n, incarnation="1", address="127.0.0.1", nproc=1) for n in NODES),
    reason="job starts",
)


def _sight(stalled: dict[str, bool], exits: dict[str, NodeExit] | None = None, drained_s: float = 0.0) -> Observation:
    alive = {
        node: NodeRecord(
            node=node,
            incarnation="1",
            beat=9,
            address="127.0.0.1",
            port=1,
            spare_ports=(7,),
            stalled=stalled[node],
            progress=TrainingProgress(job="j-1", round=4, step=120),
        )
        for node in NODES
    }
    return Observation(
        leader="a",
        epoch=1,
        alive=alive,
        answering=set(NODES),
        busy=set(),
        exits=exits or {},
        cancelled=False,
        used_ports=set(),
        elapsed=lambda _: drained_s,
        now=0.0,
    )


def _idle(node: str, ranks_left: tuple[int, ...] | None, still_s: float) -> NodeRecord:
    return NodeRecord(
        node=node, incarnation="1", beat=9, address="127.0.0.1", port=1, ranks_left=ranks_left, still_s=still_s
    )


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (_idle("a", (), 0.0), _idle("b", (0, 1), 60.0), "2 of 4 ranks have ended, and rank 2 on b, rank 3 on b did"),
        (_idle("a", (1,), 61.0), _idle("b", (), 0.0), "3 of 4 ranks have ended, and rank 1 on a did nothing for 60 s"),
        (_idle("a", (1,), 61.0), _idle("b", (0,), 59.0), ""),
        (_idle("a", (), 0.0), _idle("b", None, 90.0), "2 of 4 ranks have ended, and rank 2 on b, rank 3 on b did"),
        (_idle("a", (0, 1), 90.0), _idle("b", (0, 1), 90.0), ""),
        (_idle("a", (), 0.0), _idle("b", (), 0.0), ""),
        (_idle("a", None, 90.0), _idle("b", None, 90.0), ""),
    ],
    ids=["node", "rank", "one works", "unseen", "nobody has ended", "all have ended", "nobody was seen"],
)
def test_ranks_that_do_nothing_once_others_have_ended_are_named_and_end_the_job(
    first: NodeRecord, second: NodeRecord, named: str
) -> None:
    members = tuple(replace(member, nproc=2) for member in RUNNING.members)
    running, seen = replace(RUNNING, members=members), _sight({"a": False, "b": False})
    seen = dataclasses.replace(seen, alive={"a": first, "b": second})
    decided = decide(JOB, running, seen)
    assert (decided.reason if decided else "").startswith(f"{STALLED}: {named}" if named else "")
    assert (decided is None) == (not named)
    assert decide(replace(JOB, exit_timeout_s=0), running, seen) is None, "0 is for ever"


def test_a_job_some_of_whose_nodes_have_completed_stalls_as_others_do() -> None:
    seen = _sight({"a": False, "b": True}, {"a": _left("a", "completed")})
    decided = decide(replace(JOB, exit_timeout_s=0), RUNNING, seen)
    assert decided is not None and decided.reason.startswith(f"{STALLED} at step 120: no step")


def _left(node: str, status: str) -> NodeExit:
    return NodeExit(job="j-1", round=4, node=node, incarnation="1", status=status)  # type: ignore[arg-type]


def test_a_job_drains_once_all_of_its_nodes_are_stalled() -> None:
    assert decide(JOB, RUNNING, _sight({"a": True, "b": False})) is None
    decided = decide(JOB, RUNNING, _sight({"a": True, "b": True}))
    assert decided is not None and decided.phase == "drain"
    assert decided.reason.startswith(f"{STALLED} at step 120: no step")


@pytest.mark.parametrize("status", ["drained", "stopped"])
def test_a_stalled_job_has_failed_whether_or_not_it_wrote_a_last_checkpoint(status: str) -> None:
    draining = decide(JOB, RUNNING, _sight({"a": True, "b": True}))
    sight = _sight({"a": False, "b": False}, {node: _left(node, status) for node in NODES})
    ended = decide(JOB, draining, sight)
    assert ended is not None and ended.phase == "ended" and ended.outcome is not None
    assert ended.outcome.result == "failed" and ended.outcome.exit_code != 0
    assert ended.outcome.message.startswith("stalled at step 120") and "\n" not in ended.outcome.message


def test_a_stalled_job_whose_node_does_not_answer_has_failed_too() -> None:
    draining = replace(RUNNING, phase="drain", reason="stalled at step 1", drain_s=30.0)
    sight = _sight({"a": True, "b": True}, {"a": _left("a", "stopped")}, drained_s=20.0)
    assert decide(JOB, draining, sight) is None
    late = _sight({"a": True, "b": True}, {"a": _left("a", "stopped")}, drained_s=60.0)
    ended = decide(JOB, draining, late)
    assert ended is not None and ended.phase == "ended"


def test_a_job_that_finishes_while_it_is_being_stopped_has_succeeded() -> None:
    draining = replace(RUNNING, phase="drain", reason="stalled at step 1", drain_s=30.0)
    ended = decide(JOB, draining, _sight({"a": True, "b": True}, {node: _left(node, "completed") for node in NODES}))
    assert ended is not None and ended.outcome is not None and ended.outcome.result == "succeeded"
