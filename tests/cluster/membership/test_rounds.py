"""What rank 0 decides, by value: a table of situations."""

from __future__ import annotations

from collections.abc import Set

import pytest
from msgspec.structs import replace

from gpuctl.cluster.membership.blame import first_failure
from gpuctl.cluster.membership.rounds import CANCELLED, Observation, RoundPolicy, decide
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord, PreemptionNotice
from gpuctl.cluster.records.rounds import Member, NodeExit, RankExit, Round

POLICY = RoundPolicy()
JOB = JobSpec(job="digits-1", number=1, script="digits.py", nodes_min=2, nodes_max=3)
FIXED = replace(JOB, nodes_min=3)


def node(name: str, **fields: object) -> NodeRecord:
    record = NodeRecord(
        node=name,
        incarnation=f"{name}-1",
        beat=1,
        address=f"addr-{name}",
        port=1,
        slots=2,
        spare_ports=(int(name[1:]) * 10 + 1, int(name[1:]) * 10 + 2),
        ready=True,
        drainable=True,
    )
    return replace(record, **fields)


def running(*names: str, number: int = 1, phase: str = "run", failures: int = 0, reason: str = "job starts") -> Round:
    members = tuple(Member(node=n, incarnation=f"{n}-1", address=f"addr-{n}", nproc=2) for n in names)
    return Round(
        job=JOB.job,
        number=number,
        phase=phase,  # type: ignore[arg-type]
        epoch=1,
        members=members,
        master_address=f"addr-{names[0]}" if names else "",
        master_port=11,
        reason=reason,
        failures=failures,
        drain_s=30.0 if phase == "drain" else 0.0,
    )


def ended(name: str, status: str, *ranks: RankExit) -> NodeExit:
    return NodeExit(
        job=JOB.job,
        round=1,
        node=name,
        incarnation=f"{name}-1",
        status=status,  # type: ignore[arg-type]
        ranks=ranks,
    )


def failed(rank: int, code: int = 1, message: str = "ValueError: no", at: float = 1.0) -> RankExit:
    return RankExit(rank=rank, local_rank=0, exit_code=code, message=message, traceback=f"Traceback {message}", at=at)


def decided(
    current: Round | None,
    *nodes: NodeRecord,
    job: JobSpec = JOB,
    leader: str = "n0",
    waited_s: float = 0.0,
    exits: tuple[NodeExit, ...] = (),
    cancelled: bool = False,
    cancelled_now: bool = False,
    busy: Set[str] = frozenset(),
    silent: Set[str] = frozenset(),
    used: Set[tuple[str, int]] = frozenset(),
    policy: RoundPolicy = POLICY,
) -> Round | None:
    alive = {record.node: record for record in nodes}
    observation = Observation(
        leader=leader,
        epoch=7,
        alive=alive,
        answering=alive.keys() - silent,
        busy=busy,
        exits={e.node: e for e in exits},
        cancelled=cancelled or cancelled_now,
        cancelled_now=cancelled_now,
        used_ports=used,
        elapsed=lambda _: waited_s,
        now=100.0,
        policy=policy,
    )
    return decide(job, current, observation)


def members(decision: Round | None) -> list[str]:
    assert decision is not None and decision.phase == "run", decision
    return [member.node for member in decision.members]


# -- the first round --------------------------------------------------------------------------------------------------


def test_ranks_that_were_chosen_are_kept_whoever_leads_and_rank_0s_port_is_taken() -> None:
    decision = decided(None, node("n0"), node("n1", rank=0), node("n2", rank=2), job=FIXED)
    assert members(decision) == ["n1", "n0", "n2"]
    assert decision is not None
    assert (decision.master_address, decision.master_port) == ("addr-n1", 11)


def test_a_rank_chosen_twice_ends_the_job_once_neither_can_be_an_earlier_life() -> None:
    twice = (node("n0"), node("n1", rank=1, host="pod-1"), node("n2", rank=1, host="pod-2"))
    assert decided(None, *twice, job=FIXED, waited_s=POLICY.unsure_s - 0.1) is None
    decision = decided(None, *twice, job=FIXED, waited_s=POLICY.unsure_s)
    assert decision is not None
    assert decision.phase == "ended"
    assert decision.outcome is not None
    assert decision.outcome.exit_code == 2
    assert decision.outcome.message == "rank 1 was chosen on pod-1 (addr-n1) and on pod-2 (addr-n2)"


def test_the_only_port_of_a_node_is_used_again_in_each_round() -> None:
    only = {"master_port": 29500, "spare_ports": ()}
    first = decided(None, node("n0", **only), node("n1"), node("n2"))
    assert first is not None
    again = decided(first, node("n0", **only), node("n1"), used={("n0-1", 29500)})
    assert again is not None
    assert (first.master_port, again.number, again.master_port) == (29500, 2, 29500)


def test_a_round_with_fewer_than_it_could_have_waits_for_others_to_arrive() -> None:
    gathering = RoundPolicy(gather_s=3.0)
    for waited_s, forms in ((2.9, False), (3.0, True)):
        decision = decided(None, node("n0"), node("n1"), waited_s=waited_s, policy=gathering)
        assert (decision is not None) == forms


def test_a_job_starts_on_as_many_nodes_as_it_may_have_with_rank_0s_node_first() -> None:
    decision = decided(None, node("n1"), node("n2"), node("n0"), node("n3"))
    assert members(decision) == ["n0", "n1", "n2"]
    assert decision is not None
    assert (decision.number, decision.epoch, decision.reason) == (1, 7, "job starts")
    assert (decision.master_address, decision.master_port) == ("addr-n0", 1)
    assert [m.nproc for m in decision.members] == [2, 2, 2]


def test_it_waits_a_moment_for_more_before_it_starts_with_fewer() -> None:
    assert decided(None, node("n0"), node("n1")) is None
    assert members(decided(None, node("n0"), node("n1"), waited_s=POLICY.settle_s)) == ["n0", "n1"]


def test_it_never_starts_with_too_few() -> None:
    assert decided(None, node("n0"), waited_s=999) is None
    assert decided(None, node("n0"), node("n1"), node("n2"), job=FIXED, busy={"n2"}, waited_s=999) is None


def test_a_node_that_is_warming_up_is_waited_for_but_not_for_ever() -> None:
    cold = node("n2", ready=False)
    assert decided(None, node("n0"), node("n1"), cold, waited_s=POLICY.settle_s) is not None  # enough of them
    assert decided(None, node("n0"), node("n1", ready=False), waited_s=POLICY.settle_s) is None
    late = decided(None, node("n0"), node("n1"), node("n2", ready=False), job=replace(JOB, nodes_max=4), waited_s=20)
    assert members(late) == ["n0", "n1"]


def test_nodes_with_a_notice_in_bad_health_or_busy_are_not_used() -> None:
    noticed = node("n1", notice=PreemptionNotice(lead_s=30, at=0))
    decision = decided(
        None, node("n0"), noticed, node("n2", health="no GPU"), node("n3"), node("n4"), busy={"n4"}, waited_s=999
    )
    assert members(decision) == ["n0", "n3"]


def test_the_jobs_nproc_comes_before_the_nodes_slots() -> None:
    decision = decided(None, node("n0"), node("n1"), node("n2"), job=replace(JOB, nproc=5))
    assert decision is not None and {m.nproc for m in decision.members} == {5}


def test_a_port_is_used_once_and_a_master_without_one_is_waited_for() -> None:
    three = (node("n0"), node("n1"), node("n2"))
    second = decided(None, *three, used={("n0-1", 1)})
    assert second is not None and second.master_port == 2
    assert decided(None, *three, used={("n0-1", 1), ("n0-1", 2)}) is None


# -- the world changes ------------------------------------------------------------------------------------------------


def test_a_lost_member_begins_the_next_round_free_of_charge() -> None:
    decision = decided(running("n0", "n1", "n2"), node("n0"), node("n2"))
    assert members(decision) == ["n0", "n2"]
    assert decision is not None and (decision.number, decision.failures, decision.reason) == (2, 0, "n1 lost")


def test_when_rank_0_is_lost_the_new_one_goes_first_and_the_others_keep_their_order() -> None:
    decision = decided(running("n0", "n3", "n1"), node("n1"), node("n3"), node("n2"), leader="n1")
    assert members(decision) == ["n1", "n3", "n2"]


def test_a_restarted_agent_is_another_member() -> None:
    again = node("n1", incarnation="n1-2", ready=True)
    decision = decided(running("n0", "n1"), node("n0"), again)
    assert decision is not None and decision.reason == "n1 lost" and members(decision) == ["n0", "n1"]
    assert decision.members[1].incarnation == "n1-2"


def test_with_too_few_left_everybody_stops_and_waits_and_the_next_round_says_why() -> None:
    waiting = decided(running("n0", "n1", "n2"), node("n0"), node("n1"), job=FIXED)
    assert waiting is not None and (waiting.phase, waiting.number, waiting.members) == ("wait", 2, ())
    assert waiting.reason == "n2 lost; waiting for nodes: 1 more"
    again = decided(waiting, node("n0"), node("n1"), node("n3"), job=FIXED)
    assert again is not None and again.number == 3 and members(again) == ["n0", "n1", "n3"]
    assert again.reason == "enough nodes again after: n2 lost"


def test_a_notice_drains_the_round_within_its_lead() -> None:
    noticed = node("n1", notice=PreemptionNotice(lead_s=30, at=0))
    decision = decided(running("n0", "n1"), node("n0"), noticed)
    assert decision is not None and (decision.phase, decision.number) == ("drain", 1)
    assert decision.drain_s == 30 - POLICY.margin_s and decision.reason == "n1 given notice"


def test_a_joiner_is_let_in_by_a_drain_if_that_costs_nothing() -> None:
    three = (node("n0"), node("n1"), node("n2"))
    assert decided(running("n0", "n1"), *three) is None  # others may be about to join too
    decision = decided(running("n0", "n1"), *three, waited_s=POLICY.settle_s)
    assert decision is not None and (decision.phase, decision.reason) == ("drain", "n2 joined")


def test_a_joiner_is_left_waiting_if_there_is_no_room_or_a_stop_would_cost_steps_or_it_is_cold() -> None:
    unaware, cold = node("n1", drainable=False), node("n2", ready=False)
    assert decided(running("n0", "n1"), node("n0"), unaware, node("n2"), waited_s=99) is None
    assert decided(running("n0", "n1"), node("n0"), node("n1"), cold, waited_s=99) is None
    assert decided(running("n0", "n1", "n2"), *(node(f"n{i}") for i in range(4)), waited_s=99) is None


# -- draining ---------------------------------------------------------------------------------------------------------


def test_a_drain_ends_when_all_members_have_reported() -> None:
    draining = running("n0", "n1", phase="drain", reason="n1 given notice")
    two = (node("n0"), node("n1", notice=PreemptionNotice(lead_s=30, at=0)), node("n2"))
    assert decided(draining, *two, exits=(ended("n0", "drained"),)) is None
    decision = decided(draining, *two, exits=(ended("n0", "drained"), ended("n1", "drained")))
    assert decision is not None and decision.number == 2 and members(decision) == ["n0", "n2"]
    assert decision.reason == "n1 given notice"


@pytest.mark.parametrize(("left_s", "words"), [(21.54, ", 21.5 of 30 s left"), (-0.5, ", 30 s were not enough")])
def test_the_next_round_says_what_was_left_of_a_notice(left_s: float, words: str) -> None:
    draining = running("n0", "n1", phase="drain", reason="n1 given notice")
    told = replace(ended("n1", "drained"), notice=PreemptionNotice(lead_s=30, at=0), left_s=left_s)
    decision = decided(draining, node("n0"), node("n2"), exits=(ended("n0", "drained"), told))
    assert decision is not None and decision.reason == f"n1 given notice{words}"


def test_a_member_lost_while_draining_or_overdue_is_not_waited_for() -> None:
    draining = running("n0", "n1", phase="drain", reason="n2 joined")
    lost = decided(draining, node("n0"), node("n2"))
    assert lost is not None and lost.reason == "n2 joined; n1 lost" and members(lost) == ["n0", "n2"]
    three = (node("n0"), node("n1"), node("n2"))
    assert decided(draining, *three, waited_s=30 + POLICY.late_s) is None
    assert members(decided(draining, *three, waited_s=30 + POLICY.late_s + 0.1)) == ["n0", "n1", "n2"]


def test_a_training_that_ends_while_it_is_drained_has_ended() -> None:
    draining = running("n0", "n1", phase="drain")
    done = (ended("n0", "completed"), ended("n1", "completed"))
    decision = decided(draining, node("n0"), node("n1"), exits=done)
    assert decision is not None and decision.outcome is not None and decision.outcome.result == "succeeded"


# -- a node that is ill -----------------------------------------------------------------------------------------------

OFF_THE_BUS = "GPU 3: it has fallen off the bus"


def test_a_member_that_is_ill_saves_and_the_next_round_does_without_it() -> None:
    two = (node("n0"), node("n1", health=OFF_THE_BUS), node("n2"))
    drain = decided(running("n0", "n1"), *two, job=replace(JOB, nodes_max=2))
    assert drain is not None and (drain.phase, drain.drain_s) == ("drain", POLICY.drain_s)
    assert drain.reason == f"n1 is ill: {OFF_THE_BUS}"
    exits = (ended("n0", "drained"), ended("n1", "drained"))
    following = decided(drain, *two, job=replace(JOB, nodes_max=2), exits=exits)
    assert members(following) == ["n0", "n2"]


@pytest.mark.parametrize("told_by", ["its exit", "its heartbeat"])
def test_what_fails_with_an_ill_node_is_not_the_scripts_fault(told_by: str) -> None:
    sick = replace(ended("n1", "failed", failed(1)), ill=OFF_THE_BUS if told_by == "its exit" else "")
    health = "ok" if told_by == "its exit" else OFF_THE_BUS
    nodes = (node("n0"), node("n1", health=health), node("n2"))
    exits = (ended("n0", "failed", failed(0, message="NCCL error")), sick)
    following = decided(running("n0", "n1"), *nodes, exits=exits, job=replace(JOB, nodes_max=2))
    assert members(following) == ["n0", "n2"]
    assert following is not None
    assert (following.failures, following.reason) == (0, f"n1 is ill: {OFF_THE_BUS}")
    over = decided(running("n0", "n1"), *nodes, exits=exits, cancelled=True)
    assert over is not None and over.outcome is not None and over.outcome.result == "cancelled"


def test_too_few_that_are_well_wait_and_say_why() -> None:
    nodes = (node("n0"), node("n1", health=OFF_THE_BUS))
    waits = decided(running("n0", "n1"), *nodes, exits=(ended("n1", "failed", failed(1)),))
    assert waits is not None and waits.phase == "wait"
    assert waits.reason == f"n1 is ill: {OFF_THE_BUS}; waiting for nodes: 1 more"
    assert decided(waits, *nodes, waited_s=999) is None


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_job_succeeds_when_all_members_have_completed_even_if_one_is_gone_since() -> None:
    done = (ended("n0", "completed"), ended("n1", "completed"))
    assert decided(running("n0", "n1"), node("n0"), node("n1"), exits=done[:1]) is None
    decision = decided(running("n0", "n1"), node("n0"), exits=done)
    assert decision is not None and decision.phase == "ended"
    assert decision.outcome is not None and (decision.outcome.result, decision.outcome.exit_code) == ("succeeded", 0)


def test_a_script_that_fails_with_all_members_alive_is_restarted_as_told_and_then_fails_with_its_code() -> None:
    exits = (ended("n0", "failed", failed(0, 3)), ended("n1", "failed", failed(1, message="Connection closed by peer")))
    two = (node("n0"), node("n1"))
    again = decided(running("n0", "n1"), *two, job=replace(JOB, max_restarts=1), exits=exits)
    assert again is not None and (again.phase, again.number, again.failures) == ("run", 2, 1)
    assert again.reason.startswith("restart 1 of 1: rank 0 on n0 exited with code 3")
    over = decided(running("n0", "n1", failures=1), *two, job=replace(JOB, max_restarts=1), exits=exits)
    assert over is not None and over.outcome is not None
    assert (over.outcome.result, over.outcome.exit_code) == ("failed", 3)
    assert over.outcome.traceback == "Traceback ValueError: no"


def test_a_worker_that_a_signal_ended_is_told_with_the_signal_and_the_flag_that_would_have_gone_on() -> None:
    rank = RankExit(rank=1, local_rank=0, exit_code=137, signal="SIGKILL", message="the kernel ended it")
    exits = (ended("n0", "completed"), ended("n1", "failed", rank))
    over = decided(running("n0", "n1"), node("n0"), node("n1"), exits=exits)
    assert over is not None and over.outcome is not None
    assert over.outcome.message == "rank 1 on n1 was killed by SIGKILL: the kernel ended it"
    assert over.outcome.hint == "--max-restarts N would have started it again"
    often = replace(JOB, max_restarts=1)
    last = decided(running("n0", "n1", failures=1), node("n0"), node("n1"), job=often, exits=exits)
    assert last is not None and last.outcome is not None and last.outcome.hint == ""


def test_why_a_member_stopped_is_said_where_it_is_known() -> None:
    rank = RankExit(rank=0, local_rank=0, exit_code=1, message="the kernel was out of memory")
    exits = (ended("n0", "stopped"), ended("n1", "stopped", rank))
    again = decided(running("n0", "n1"), node("n0"), node("n1"), exits=exits)
    assert again is not None and again.reason == "n0, n1 stopped: the kernel was out of memory"


def test_a_failure_is_judged_only_when_the_others_have_reported_or_had_their_time() -> None:
    one = (ended("n0", "failed", failed(0)),)
    two = (node("n0"), node("n1"))
    assert decided(running("n0", "n1"), *two, exits=one) is None
    judged = decided(running("n0", "n1"), *two, exits=one, waited_s=POLICY.blame_s)
    assert judged is not None and judged.phase == "ended"


def test_a_member_that_does_not_answer_is_given_the_time_to_be_found_lost() -> None:
    one = (ended("n0", "failed", failed(0, message="Connection closed by peer")),)
    two = (node("n0"), node("n1"))
    assert decided(running("n0", "n1"), *two, exits=one, waited_s=POLICY.blame_s, silent={"n1"}) is None
    lost = decided(running("n0", "n1"), node("n0"), node("n2"), exits=one, waited_s=POLICY.blame_s)
    assert lost is not None and (lost.reason, lost.failures) == ("n1 lost", 0)


def test_the_first_rank_to_fail_by_itself_is_blamed_and_not_its_victims() -> None:
    exits = {
        "n0": ended("n0", "failed", failed(0, message="RuntimeError: Connection closed by peer", at=1.0)),
        "n1": ended("n1", "failed", failed(3, code=143, message="", at=1.5), failed(2, code=137, message="", at=3.0)),
        "n2": ended("n2", "failed", failed(4, message="ValueError: labels", at=4.0)),
    }
    blamed = first_failure(exits)
    assert blamed is not None and (blamed[0], blamed[1].rank) == ("n1", 2)
    assert first_failure({"n0": exits["n0"]}) == ("n0", exits["n0"].ranks[0])
    assert first_failure({}) is None


def test_a_cancelled_job_ends_at_once_if_nothing_runs_and_after_a_drain_if_something_does() -> None:
    before = decided(None, node("n0"), cancelled=True)
    assert before is not None and before.outcome is not None and before.outcome.exit_code == 130
    drain = decided(running("n0", "n1"), node("n0"), node("n1"), cancelled=True)
    assert drain is not None and (drain.phase, drain.reason) == ("drain", CANCELLED)
    after = (ended("n0", "drained"), ended("n1", "stopped"))
    over = decided(
        running("n0", "n1", phase="drain", reason=CANCELLED), node("n0"), node("n1"), cancelled=True, exits=after
    )
    assert over is not None and over.outcome is not None and over.outcome.result == "cancelled"


@pytest.mark.parametrize("phase", ["run", "drain"])
def test_a_job_cancelled_now_ends_without_a_drain_or_in_the_midst_of_one(phase: str) -> None:
    one_hangs = (ended("n0", "completed"),)
    over = decided(
        running("n0", "n1", phase=phase), node("n0"), node("n1"), cancelled_now=True, exits=one_hangs, waited_s=1
    )
    assert over is not None and over.phase == "ended"
    assert over.outcome is not None and over.outcome.result == "cancelled"


def test_what_has_ended_stays_ended() -> None:
    over = running("n0", "n1", phase="ended")
    assert decided(over, node("n0"), node("n1"), node("n2"), cancelled=True, waited_s=999) is None


# -- what was wrong once ----------------------------------------------------------------------------------------------


def test_the_first_round_of_a_job_that_waited_in_line_is_number_one() -> None:
    in_line = Round(job=JOB.job, number=0, phase="wait", epoch=1, reason="in line")
    first = decided(in_line, node("n0"), node("n1"), node("n2"))
    assert first is not None and (first.number, first.reason) == (1, "job starts")


def test_after_a_loss_a_cold_node_does_not_hold_up_the_survivors_unless_there_would_be_too_few() -> None:
    alive = (node("n0"), node("n2"), node("n3", ready=False))
    assert members(decided(running("n0", "n1", "n2"), *alive)) == ["n0", "n2"]
    assert members(decided(running("n0", "n1", "n2"), *alive, job=FIXED)) == ["n0", "n2", "n3"]


def test_a_survivor_that_prepares_another_job_meanwhile_counts_as_warm() -> None:
    assert members(decided(running("n0", "n1", "n2"), node("n0"), node("n2", ready=False))) == ["n0", "n2"]


def test_a_port_of_an_earlier_life_of_the_master_counts_for_nothing() -> None:
    first = decided(None, node("n0"), node("n1"), node("n2"), used={("n0-0", 1), ("n0-0", 2)})
    assert first is not None and first.master_port == 1


def test_a_member_that_completed_may_go_away_while_another_still_runs() -> None:
    done = (ended("n0", "completed"),)
    assert decided(running("n0", "n1"), node("n1"), exits=done, waited_s=999) is None


def test_a_notice_comes_too_late_for_a_round_whose_members_complete() -> None:
    noticed = node("n1", notice=PreemptionNotice(lead_s=30, at=0))
    assert decided(running("n0", "n1"), node("n0"), noticed, exits=(ended("n0", "completed"),)) is None


def test_a_member_that_stopped_without_being_asked_costs_a_round_and_nothing_else() -> None:
    stopped, two = (ended("n0", "stopped"),), (node("n0"), node("n1"))
    assert decided(running("n0", "n1"), *two, exits=stopped) is None  # the others may tell of a failure
    again = decided(running("n0", "n1"), *two, exits=stopped, waited_s=POLICY.blame_s)
    assert again is not None and (again.number, again.failures, again.reason) == (2, 0, "n0 stopped")
    both = (ended("n0", "drained"), ended("n1", "drained"))
    assert members(decided(running("n0", "n1"), *two, exits=both)) == ["n0", "n1"]


def test_a_failure_while_draining_is_not_counted() -> None:
    exits = (ended("n0", "failed", failed(0)), ended("n1", "drained"))
    again = decided(running("n0", "n1", phase="drain"), node("n0"), node("n1"), exits=exits)
    assert again is not None and (again.phase, again.failures) == ("run", 0)


def test_a_member_that_drained_and_left_is_not_lost() -> None:
    draining = running("n0", "n1", phase="drain", reason="n1 given notice")
    assert decided(draining, node("n0"), node("n2"), exits=(ended("n1", "drained"),)) is None


def test_a_notice_without_time_to_spare_drains_at_once() -> None:
    decision = decided(running("n0", "n1"), node("n0"), node("n1", notice=PreemptionNotice(lead_s=1, at=0)))
    assert decision is not None and (decision.phase, decision.drain_s) == ("drain", 0)


def test_a_launcher_that_failed_without_naming_a_rank_is_blamed_by_its_node() -> None:
    over = decided(running("n0", "n1"), node("n0"), node("n1"), exits=(ended("n1", "failed"),), waited_s=99)
    assert over is not None and over.outcome is not None
    assert over.outcome.message == "rank -1 on n1 exited with code 1: the launcher failed"


def test_a_cancelled_job_that_loses_a_member_or_fails_is_not_formed_anew() -> None:
    lost = decided(running("n0", "n1"), node("n0"), node("n2"), cancelled=True)
    assert lost is not None and lost.outcome is not None and lost.outcome.result == "cancelled"
    exits = (ended("n0", "failed", failed(0)), ended("n1", "failed", failed(1)))
    two, often = (node("n0"), node("n1")), replace(JOB, max_restarts=9)
    broken = decided(running("n0", "n1"), *two, job=often, cancelled=True, exits=exits)
    assert broken is not None and broken.outcome is not None and broken.outcome.result == "cancelled"
    drained = running("n0", "n1", phase="drain", reason="n2 joined")
    over = decided(drained, *two, cancelled=True, exits=(ended("n0", "drained"), ended("n1", "drained")))
    assert over is not None and over.outcome is not None and over.outcome.result == "cancelled"


def test_a_job_that_completed_although_it_was_cancelled_has_succeeded() -> None:
    done = (ended("n0", "completed"), ended("n1", "completed"))
    over = decided(running("n0", "n1"), node("n0"), node("n1"), cancelled=True, exits=done)
    assert over is not None and over.outcome is not None and over.outcome.result == "succeeded"


def test_a_node_that_reports_a_failure_in_its_last_moments_is_lost_and_not_to_blame() -> None:
    # Its worker, or its interpreter, was killed a moment before its agent.
    exits = (ended("n1", "failed", failed(1, code=137, message="")), ended("n0", "failed", failed(0)))
    decision = decided(running("n0", "n1", "n2"), node("n0"), node("n2"), exits=exits, waited_s=99)
    assert decision is not None and (decision.reason, decision.failures) == ("n1 lost", 0)


def test_a_launcher_that_was_killed_makes_victims_and_nobody_is_blamed() -> None:
    exits = (ended("n1", "stopped"), ended("n0", "failed", failed(0, message="Connection closed by peer")))
    decision = decided(running("n0", "n1"), node("n0"), node("n1"), exits=exits)
    assert decision is not None and (decision.reason, decision.failures) == ("n1 stopped", 0)
