"""Mingle, the lease and the fence under random faults, at the granularity of single requests to the store."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpuctl.cluster.mingle import Sign
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
    def mislead(self, which: int, other: int, sign: Sign, both: bool, when: Moment) -> None:
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
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
