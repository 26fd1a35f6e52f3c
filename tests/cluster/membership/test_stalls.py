"""When rank 0 ends a job whose workers do nothing any more, and what it says of it."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from gpuctl.cluster.membership.rounds import Observation, decide
from gpuctl.cluster.membership.stalls import STALLED
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord, TrainingProgress
from gpuctl.cluster.records.rounds import Member, NodeExit, Round

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
