"""Mingle, the lease and the fence under random faults, at the granularity of single requests to the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.agreement.ledger import LedgerEntry
from gpuctl.cluster.membership.failure_detector import PeerState
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.rounds import JobOutcome
from tests.cluster.simulation import Node, Simulation, Spoil

NODES = ("a", "b", "c", "d", "e")

Moment = tuple[float, list[tuple[int, int]], float]
"""When something happens: the clock goes on; some tasks get so many requests each, and then comes what happens (in the
middle of whatever they do); then everybody goes on for so many seconds."""

pick = st.integers(0, 9)
moments = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0]),
    st.lists(st.tuples(pick, st.integers(0, 15)), max_size=8),
    st.sampled_from([0.0, 0.4, 1.0, 2.5, 5.0]),
)
spoils = st.lists(st.sampled_from(["ok", "ok", "cut", "mute", "late", "pause"]), min_size=1, max_size=12)


class Cluster(RuleBasedStateMachine):
    """Whatever happens: the rules of ``simulation.Rules`` hold. And once nothing happens any more, all jobs end."""

    sim: Simulation
    size = 0
    broken = False

    @initialize(nodes=st.integers(2, 4), plain=st.booleans(), contact=st.booleans(), long=st.booleans(), when=moments)
    def begin(self, nodes: int, plain: bool, contact: bool, long: bool, when: Moment) -> None:
        self.sim = Simulation(NODES[:nodes], contact=contact)
        self.sim.holding = long
        self.size = nodes
        self.sim.submit(nodes - 1, nodes + 1, plain=plain)
        self.sim.submit(1, 2, restarts=1)
        self._do(lambda sim: sim.pass_time(4), when)

    @rule(when=moments)
    def nothing_happens(self, when: Moment) -> None:
        self._do(lambda _: None, when)

    @rule(
        least=st.integers(1, 4), more=st.integers(0, 2), restarts=st.integers(0, 2), plain=st.booleans(), when=moments
    )
    @precondition(lambda self: len(self.sim.unfinished()) < 4)
    def submit(self, least: int, more: int, restarts: int, plain: bool, when: Moment) -> None:
        least = min(least, self.size)
        self._do(lambda sim: sim.submit(least, least + more, restarts=restarts, plain=plain), when)

    @rule(which=pick, when=moments)
    @precondition(lambda self: len(self.sim.rules.cancelled) < 2)
    def cancel(self, which: int, when: Moment) -> None:
        self._do(lambda sim: sim.cancel(list(sim.jobs)[which % len(sim.jobs)]), when)

    @rule(which=pick, when=moments)
    def freeze(self, which: int, when: Moment) -> None:
        self._with_node(which, "freezes", lambda _, node: node.freeze(), when)

    @rule(when=moments)
    def thaw(self, when: Moment) -> None:
        def go(sim: Simulation) -> None:
            for node in sim.nodes.values():
                if node.frozen_at is not None:
                    sim.say(node.name, "thaws")
                    node.frozen_at = None

        self._do(go, when)

    @rule(which=pick, when=moments)
    def crash(self, which: int, when: Moment) -> None:
        self._with_node(which, "crashes", lambda _, node: node.crash(), when)

    @rule(which=pick, when=moments)
    def start_again(self, which: int, when: Moment) -> None:
        def go(sim: Simulation) -> None:
            away = [name for name, node in sim.nodes.items() if not node.alive]
            if away:
                sim.start(away[which % len(away)])

        self._do(go, when)

    @rule(which=pick, when=moments)
    def crash_and_start_at_once(self, which: int, when: Moment) -> None:
        def go(sim: Simulation, node: Node) -> None:
            node.crash()
            sim.start(node.name)

        self._with_node(which, "crashes", go, when)

    @rule(when=moments)
    @precondition(lambda self: len(self.sim.nodes) < len(NODES))
    def join(self, when: Moment) -> None:
        self._do(lambda sim: sim.start(NODES[len(sim.nodes)]), when)

    @rule(which=pick, lead=st.sampled_from([0.0, 3.0, 8.0]), when=moments)
    def give_notice(self, which: int, lead: float, when: Moment) -> None:
        self._with_node(which, f"is given notice of {lead} s", lambda _, node: node.warn(lead), when)

    @rule(which=pick, plan=spoils, when=moments)
    def spoil_requests(self, which: int, plan: list[Spoil], when: Moment) -> None:
        self._with_node(which, f"will see {' '.join(plan)}", lambda _, node: node.plan.extend(plan), when)

    @rule(
        which=pick,
        part=st.sampled_from(["/rounds/", "/rounds/", "rank0/", "checkpoints/", "exits/", "nodes/"]),
        spoil=st.sampled_from(["freeze", "freeze", "die", "mute", "late", "cut"]),
        when=moments,
    )
    def spoil_a_write(self, which: int, part: str, spoil: Spoil, when: Moment) -> None:
        self._with_node(which, f"will {spoil} at {part}", lambda _, node: node.traps.update({part: spoil}), when)

    @rule(which=pick, spoil=st.sampled_from(["ok", "cut", "mute"]), when=moments)
    def part_from_the_store(self, which: int, spoil: Spoil, when: Moment) -> None:
        self._with_node(which, f"sees the store {spoil}", lambda _, node: setattr(node, "base", spoil), when)

    @rule(when=moments)
    @precondition(lambda self: self.sim.late)
    def land_late_writes(self, when: Moment) -> None:
        self._do(lambda sim: sim.land_late(), when)

    @rule(which=pick, other=pick, sign=st.sampled_from(["unknown", "gone", "silent"]), both=st.booleans(), when=moments)
    def mislead(self, which: int, other: int, sign: PeerState, both: bool, when: Moment) -> None:
        def go(sim: Simulation) -> None:
            names = list(sim.nodes)
            one, two = names[which % len(names)], names[other % len(names)]
            for pair in [(one, two), (two, one)][: 1 + both]:
                sim.say(pair[0], f"believes {pair[1]} {sign}")
                sim.lies[pair] = sign

        self._do(go, when)

    @rule(when=moments)
    def tell_the_truth(self, when: Moment) -> None:
        self._do(lambda sim: sim.lies.clear(), when)

    @rule(which=pick, when=moments)
    def a_worker_fails(self, which: int, when: Moment) -> None:
        self._with_node(which, "has a worker that fails", lambda _, node: node.fail_worker(), when)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            try:
                if not self.broken:
                    settle(self.sim)
            finally:
                self.sim.close()

    def _do(self, action: Callable[[Simulation], object], when: Moment) -> None:
        before, slices, after = when
        try:
            self.sim.now += before
            for choice, budget in slices:
                self.sim.step(choice, budget)
            action(self.sim)
            self.sim.pass_time(after)
        except BaseException:
            self.broken = True
            raise

    def _with_node(self, which: int, what: str, action: Callable[[Simulation, Node], object], when: Moment) -> None:
        def go(sim: Simulation) -> None:
            alive = [node for node in sim.nodes.values() if node.alive]
            if alive:
                node = alive[which % len(alive)]
                sim.say(node.name, what)
                action(sim, node)

        self._do(go, when)


def settle(sim: Simulation) -> None:
    """Faults end. Within a minute one node leads, and all jobs that can run do; then all jobs end."""
    sim.holding = True
    sim.heal(max(spec.nodes_min for spec in sim.jobs.values()))
    for _ in range(2):  # the first time a job may still have room to grow
        if not sim.pass_time(60, lambda: not complaints(sim)):
            sim.fail(f"not settled in a minute: {complaints(sim)}")
        sim.pass_time(5)
    sim.holding = False
    if not sim.pass_time(20 + 40 * len(sim.jobs), lambda: not sim.unfinished()):
        sim.fail(f"these jobs never end: {sim.unfinished()}")


def complaints(sim: Simulation) -> list[str]:
    """What is not yet as it should be when all is quiet."""
    nodes = [node for node in sim.nodes.values() if node.alive]
    found = []
    leaders = {node.mingle.lease.holder.node for node in nodes if node.mingle.lease.holder}
    if len(leaders) != 1 or [node.name for node in nodes if node.mingle.leads] != list(leaders):
        found.append(f"leaders {leaders}, leading {[node.name for node in nodes if node.mingle.leads]}")
    free = {node.name for node in nodes}
    waiting = []
    for job in sim.unfinished():
        now = sim.rules.newest(job)
        if now is None or now.phase == "wait":
            waiting.append(job)
            continue
        free -= {member.node for member in now.members}
        for member in now.members:
            run = sim.lives[member.node, member.incarnation].run
            if run is None or (run.round.job, run.round.number) != (job, now.number) or run.exit or now.phase != "run":
                found.append(f"{member.node} does not run {job} round {now.number} {now.phase}")
    if waiting and sim.jobs[waiting[0]].nodes_min <= len(free):
        found.append(f"{waiting[0]} waits, and {free} are free")
    return found


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# -- single situations ------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Callable[..., Simulation]]:
    """``cluster("abc")`` starts nodes; ``a`` leads."""
    started: list[Simulation] = []

    def start(names: str, *, contact: bool = True, seconds: float = 4.0) -> Simulation:
        sim = Simulation(names, contact=contact)
        started.append(sim)
        sim.pass_time(seconds)
        return sim

    yield start
    for sim in started:
        sim.close()


Start = Callable[..., Simulation]


def members(sim: Simulation, job: str) -> str:
    now = sim.rules.newest(job)
    if now is None or now.phase not in ("run", "drain"):
        return now.phase if now else ""
    return "".join(member.node for member in now.members)


def result(sim: Simulation, job: str) -> str | None:
    now = sim.rules.newest(job)
    return now.outcome.result if now and now.outcome else None


def test_a_start_that_a_deposed_rank_0_had_on_its_way_does_not_give_a_node_to_two_jobs(cluster: Start) -> None:
    sim = cluster("ab")
    sim.holding = True
    sim.submit(2, 2)
    sim.submit(1, 1)
    sim.pass_time(2)
    assert (members(sim, "job-1"), members(sim, "job-2")) == ("ab", "wait")
    sim.nodes["a"].traps["job-2/rounds/"] = "freeze"
    sim.start("c")
    assert sim.pass_time(20, lambda: members(sim, "job-1") == "bc")
    sim.nodes["a"].frozen_at = None
    sim.pass_time(5)
    assert (members(sim, "job-1"), members(sim, "job-2")) == ("bc", "a")


def test_a_start_that_lands_late_does_not_give_a_node_to_two_jobs(cluster: Start) -> None:
    sim = cluster("abc")
    sim.holding = True
    sim.submit(2, 2)
    sim.pass_time(1)
    sim.nodes["a"].traps["job-2/rounds/000000000002"] = "late"
    sim.submit(1, 1)
    assert sim.pass_time(5, lambda: bool(sim.late))
    sim.nodes["b"].crash()
    assert sim.pass_time(5, lambda: members(sim, "job-1") == "ac")
    sim.land_late()
    sim.pass_time(5)
    assert members(sim, "job-2") == "wait"


def test_two_nodes_that_take_each_other_for_gone_do_not_depose_each_other_for_ever(cluster: Start) -> None:
    sim = cluster("abc")
    sim.lies = {("a", "b"): "gone", ("b", "a"): "gone"}
    sim.submit(3, 3)
    assert sim.pass_time(60, lambda: result(sim, "job-1") == "succeeded")
    assert len(sim.rules.holders) < 8


def test_a_rank_0_that_leaves_is_followed_at_once_even_without_direct_contact(cluster: Start) -> None:
    sim = cluster("ab", contact=False)
    sim.nodes["a"].warn(30)
    assert sim.pass_time(5, lambda: not sim.nodes["a"].alive)
    assert sim.pass_time(1.1, lambda: sim.nodes["b"].mingle.leads)


def test_a_rank_0_that_is_cut_off_is_followed_after_its_lease(cluster: Start) -> None:
    sim = cluster("ab", contact=False)
    sim.nodes["a"].base = "cut"
    assert not sim.pass_time(2.5, lambda: sim.nodes["b"].mingle.leads)
    assert sim.pass_time(3, lambda: sim.nodes["b"].mingle.leads)
    sim.nodes["a"].base = "ok"
    sim.pass_time(2)
    assert not sim.nodes["a"].mingle.leads


def test_a_bucket_that_takes_nothing_for_many_leases_costs_no_round(cluster: Start) -> None:
    sim = cluster("abc")
    sim.holding = True
    job = sim.submit(3, 3)
    assert sim.pass_time(10, lambda: members(sim, job) == "abc")
    before = sim.rules.newest(job)
    sim.full = True
    sim.pass_time(20)
    sim.full = False
    sim.nodes["b"].base = sim.nodes["c"].base = "cut"  # rank 0's heartbeat is the first that gets there again
    sim.pass_time(1)
    sim.nodes["b"].base = sim.nodes["c"].base = "ok"
    sim.pass_time(10)
    after = sim.rules.newest(job)
    assert before and after and (after.number, after.phase) == (before.number, "run")


def test_a_job_that_rank_0_told_a_node_of_is_not_forgotten_when_that_node_could_not_look_it_up(cluster: Start) -> None:
    sim = cluster("ab", contact=False)
    sim.holding = True
    sim.nodes["b"].blind_for = "job-1/rounds"
    sim.submit(1, 1)
    sim.pass_time(2.5)
    sim.nodes["a"].crash()
    sim.nodes["b"].blind_for = ""
    assert sim.pass_time(15, lambda: members(sim, "job-1") == "b")


def test_first_in_first_out_even_if_a_later_job_would_fit(cluster: Start) -> None:
    sim = cluster("abc")
    sim.holding = True
    for size in (2, 2, 1):
        sim.submit(size, size)
    sim.pass_time(3)
    assert [members(sim, job) for job in sim.jobs] == ["ab", "wait", "wait"]
    sim.holding = False
    assert sim.pass_time(15, lambda: members(sim, "job-2") == "ab")
    assert members(sim, "job-3") == "c"


def test_a_job_behind_one_that_waits_can_be_cancelled(cluster: Start) -> None:
    sim = cluster("ab")
    for size in (3, 1, 1):
        sim.submit(size, size)
    sim.pass_time(2)
    sim.cancel("job-3")
    sim.pass_time(3)
    assert [result(sim, job) for job in sim.jobs] == [None, None, "cancelled"]


def test_nodes_that_a_job_drains_for_are_not_given_to_the_next_one(cluster: Start) -> None:
    sim = cluster("a")
    sim.holding = True
    sim.submit(1, 2)
    assert sim.pass_time(5, lambda: members(sim, "job-1") == "a")
    sim.start("b")
    assert sim.pass_time(6, lambda: len(sim.rules.rounds["job-1"]) == 3)  # it drains
    sim.submit(1, 1)
    sim.pass_time(5)
    assert (members(sim, "job-1"), members(sim, "job-2")) == ("ab", "wait")
    assert len(sim.rules.rounds["job-1"]) == 4


def test_a_member_in_a_crash_loop_does_not_hold_up_the_others(cluster: Start) -> None:
    sim = cluster("abc", contact=False)
    sim.holding = True
    sim.submit(2, 3)
    sim.pass_time(2)
    assert members(sim, "job-1") == "abc"
    for _ in range(6):
        sim.nodes["b"].crash()
        sim.start("b")
        sim.pass_time(0.8)
    assert members(sim, "job-1") == "ac"


def test_a_job_whose_spec_cannot_be_read_ends_and_the_line_goes_on(cluster: Start) -> None:
    sim = cluster("a")
    sim.submit(1, 1)
    sim.files[layout.job_spec("job-1")] = (b"{}", 0)
    sim.submit(1, 1)
    assert sim.pass_time(20, lambda: not sim.unfinished())
    first = sim.rules.newest("job-1")
    assert first is not None
    assert first.outcome is not None
    assert (first.outcome.result, first.outcome.exit_code, result(sim, "job-2")) == ("failed", 2, "succeeded")
    sim.nodes["a"].crash()
    sim.start("a")
    sim.pass_time(5)
    assert sim.rules.newest("job-1") == first


def test_a_running_job_whose_spec_cannot_be_read_by_the_next_rank_0_ends_in_its_round(cluster: Start) -> None:
    sim = cluster("ab")
    sim.holding = True
    sim.submit(1, 1)
    sim.pass_time(1)
    sim.files[layout.job_spec("job-1")] = (b"not json", 0)
    sim.nodes["a"].crash()
    assert sim.pass_time(10, lambda: not sim.unfinished())
    assert [entry.number for entry in sim.rules.rounds["job-1"]] == [0, 1, 1]


def test_a_job_that_ended_is_not_looked_up_for_ever(cluster: Start) -> None:
    sim = cluster("ab")
    sim.submit(1, 1)
    sim.submit(2, 2)
    assert sim.pass_time(30, lambda: not sim.unfinished())
    sim.start("c")
    sim.pass_time(5)
    before = {key: count for key, count in sim.asked.items() if "job-" in key[1]}
    sim.pass_time(20)
    assert {key: count for key, count in sim.asked.items() if "job-" in key[1]} == before


def test_an_end_that_rank_0_has_not_seen_is_looked_up_once(cluster: Start) -> None:
    sim = cluster("a")
    sim.holding = True
    sim.submit(1, 1)
    sim.pass_time(1)
    now = sim.rules.newest("job-1")
    assert now is not None
    gone = replace(now, phase="ended", outcome=JobOutcome(result="cancelled", exit_code=130))
    data = encode(LedgerEntry("user", msgspec.Raw(encode(gone))))
    sim.files[f"{layout.rounds('job-1')}/{3:012d}"] = (data, 0)
    sim.start("b")
    sim.pass_time(5)
    assert sim.asked["b", layout.rounds("job-1")] == 1


def test_rank_0_asks_in_proportion_to_the_nodes_and_the_others_for_two_keys_and_a_beat(cluster: Start) -> None:
    def per_second(names: str) -> Counter[str]:
        sim = cluster(names)
        before = Counter({name: sum(n for (who, _), n in sim.asked.items() if who == name) for name in names})
        sim.pass_time(10)
        after = Counter({name: sum(n for (who, _), n in sim.asked.items() if who == name) for name in names})
        return Counter({name: (after[name] - before[name]) // 10 for name in names})

    four, eight = per_second("abcd"), per_second("abcdefgh")
    assert eight["a"] - four["a"] == 4
    assert {four[name] for name in "bcd"} == {eight[name] for name in "bcdefgh"} == {3}


def test_a_node_that_slept_past_many_changes_of_rank_0_learns_of_the_last(cluster: Start) -> None:
    sim = cluster("ab", contact=False)
    sim.nodes["b"].freeze()
    for _ in range(20):
        sim.nodes["a"].crash()
        sim.start("a")
        sim.pass_time(1.5)
    sim.nodes["b"].frozen_at = None
    sim.pass_time(15)
    assert len({node.mingle.lease.epoch for node in sim.nodes.values()}) == 1


def test_a_heartbeat_of_another_version_counts_as_none(cluster: Start) -> None:
    sim = cluster("ab", contact=False)
    sim.nodes["a"].freeze()
    sim.files[layout.node("a")] = (b'{"node": 5}', -1)
    assert sim.pass_time(3, lambda: sim.nodes["b"].mingle.leads)
    sim.pass_time(2)
    assert list(sim.nodes["b"].mingle.view) == ["b"]


def test_a_node_of_a_job_that_drains_is_in_no_other_job(cluster: Start) -> None:
    sim = cluster("abcd")
    sim.holding = True
    sim.submit(2, 2, plain=True)  # which goes on until it is killed
    sim.submit(1, 2)
    sim.pass_time(3)
    assert (members(sim, "job-1"), members(sim, "job-2")) == ("ab", "cd")
    sim.cancel("job-1")
    sim.nodes["d"].crash()
    assert sim.pass_time(20, lambda: members(sim, "job-2") == "c")


def test_a_deposed_rank_0_that_wakes_writes_nothing_over_its_successors_decisions(cluster: Start) -> None:
    sim = cluster("abc")
    sim.holding = True
    sim.submit(2, 2)
    sim.pass_time(2)
    sim.nodes["b"].traps["job-1/rounds/"] = "freeze"  # the next rank 0, in the middle of its first decision
    sim.nodes["a"].crash()
    sim.pass_time(15)
    assert sim.nodes["c"].mingle.leads
    sim.nodes["b"].frozen_at = None
    sim.pass_time(5)  # ``simulation.Rules`` looks at each entry
    assert sim.nodes["c"].mingle.leads


def test_a_new_rank_0_does_not_take_members_that_it_has_not_met_for_lost(cluster: Start) -> None:
    sim = cluster("abc", contact=False)
    sim.holding = True
    sim.submit(2, 3)
    sim.pass_time(2)
    assert members(sim, "job-1") == "abc"
    sim.nodes["a"].crash()
    assert sim.pass_time(30, lambda: members(sim, "job-1") == "bc")
    assert [entry.number for entry in sim.rules.rounds["job-1"] if entry.phase == "run"][-1] == 2


def test_a_heartbeat_that_a_dead_node_left_starts_no_job_on_it(cluster: Start) -> None:
    sim = cluster("ab", contact=False)
    for node in list(sim.nodes.values()):
        node.crash()
    sim.submit(1, 2)
    sim.start("a")
    sim.pass_time(10)
    begun = [entry for entry in sim.rules.rounds["job-1"] if entry.phase == "run"]
    assert [[member.node for member in entry.members] for entry in begun[:1]] == [["a"]]
