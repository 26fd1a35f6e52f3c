"""A node's turns, with rounds that the test decides and runs that end when it says so."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.agent.reconcile import Reconciler
from gpuctl.cluster import layout
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.rounds import Member, NodeExit, Phase, Round
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes.clock import HandClock

NODE, LIFE = "node-0", "life"


@dataclass
class Part:
    """Of the node in a round."""

    round: Round
    done: list[str]
    exit: NodeExit | None = None

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def ask_to_stop(self, round_: Round) -> None:
        self.done.append(f"drain {round_.number}")

    def kill(self) -> None:
        self.done.append(f"kill {self.round.number}")

    def send_last_words(self) -> None:
        self.done.append(f"last words of {self.round.number}")

    def end(self) -> None:
        self.done.append(f"end {self.round.number}")

    def ends(self, status: str = "completed") -> None:
        self.exit = NodeExit(job="a", round=self.round.number, node=NODE, incarnation=LIFE, status=status)  # type: ignore[arg-type]


@dataclass
class Machine:
    """What a reconciler has around it; ``done``: all that it did, in its order."""

    done: list[str] = field(default_factory=list)
    jobs: dict[str, Version[Round]] = field(default_factory=dict)
    told_of_notice: bool = False
    parts: list[Part] = field(default_factory=list)

    def tick(self) -> bool:
        return False

    def begin(self, round_: Round, rank: int) -> Part:
        self.done.append(f"begin {round_.number} as {rank}")
        self.parts.append(Part(round_, self.done))
        return self.parts[-1]

    def send_heartbeat(self) -> None:
        self.done.append("beat")

    def poke(self) -> None:
        self.done.append("poke")

    def wake(self) -> None:
        self.done.append("wake")

    def say(self, line: str) -> None:
        self.done.append(line)

    def decide(self, number: int, phase: Phase = "run", life: str = LIFE) -> None:
        other = Member(node="node-1", incarnation="x", address="", nproc=1)
        members = (other, replace(other, node=NODE, incarnation=life))
        self.jobs["a"] = Version(Round(job="a", number=number, phase=phase, epoch=1, members=members), number)

    def turn(self, reconciler: Reconciler[Part]) -> list[str]:
        self.done.clear()
        reconciler.turn()
        return list(self.done)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def reconciler(machine: Machine, clock: HandClock, file_url: str) -> Reconciler[Part]:
    return Reconciler(NODE, LIFE, open_bucket(file_url), clock, machine, machine.begin, machine)


def recorded(file_url: str, number: int) -> NodeExit | None:
    data = open_bucket(file_url).get(layout.node_exit("a", number, NODE))
    return decode(data, NodeExit, "exit") if data else None


def test_a_round_begins_once_the_run_of_the_one_before_has_ended(
    machine: Machine, reconciler: Reconciler[Part], file_url: str
) -> None:
    machine.decide(1)
    assert machine.turn(reconciler) == ["begin 1 as 1"]
    assert machine.turn(reconciler) == []
    machine.decide(2)
    assert machine.turn(reconciler) == ["kill 1"]
    machine.parts[0].ends("stopped")
    assert machine.turn(reconciler) == ["end 1", "begin 2 as 1", "a round 1: stopped", "poke", "wake"]
    assert recorded(file_url, 1) == machine.parts[0].exit


def test_a_round_that_drains_is_asked_to_stop_and_never_begun(machine: Machine, reconciler: Reconciler[Part]) -> None:
    machine.decide(1, "drain")
    assert machine.turn(reconciler) == []
    machine.decide(2)
    machine.turn(reconciler)
    machine.decide(2, "drain")
    assert machine.turn(reconciler) == ["drain 2"]
    machine.parts[0].ends("drained")
    assert machine.turn(reconciler) == ["last words of 2", "a round 2: drained", "poke", "wake"]


def test_a_round_of_another_life_of_this_node_is_none_of_its_business(
    machine: Machine, reconciler: Reconciler[Part]
) -> None:
    machine.decide(1, life="the one before")
    assert machine.turn(reconciler) == []


def test_last_words_come_before_the_exit_and_it_is_told_once(
    machine: Machine, reconciler: Reconciler[Part], file_url: str
) -> None:
    machine.decide(1)
    machine.turn(reconciler)
    machine.parts[0].ends()
    assert machine.turn(reconciler) == ["last words of 1", "a round 1: completed", "poke", "wake"]
    assert machine.turn(reconciler) == []
    assert recorded(file_url, 1) == machine.parts[0].exit


def test_a_notice_is_told_first_and_in_every_exit_and_the_first_one_counts(
    machine: Machine, reconciler: Reconciler[Part], clock: HandClock, file_url: str
) -> None:
    machine.decide(1)
    machine.turn(reconciler)
    reconciler.take_notice(30.0, "the cloud")
    reconciler.take_notice(5.0, "SIGTERM")
    assert machine.turn(reconciler) == ["beat", "poke"]
    machine.told_of_notice = True
    clock.now += 4.0
    machine.parts[0].ends("drained")
    machine.turn(reconciler)
    ended = recorded(file_url, 1)
    assert ended and ended.notice and ended.notice.source == "the cloud"
    assert ended.left_s == pytest.approx(26.0)


def test_a_node_leaves_when_nothing_is_asked_of_it_or_its_time_is_up(
    machine: Machine, reconciler: Reconciler[Part], clock: HandClock
) -> None:
    assert not reconciler.may_leave()
    machine.decide(1)
    reconciler.take_notice(30.0, "the cloud")
    machine.told_of_notice = True
    assert not reconciler.may_leave(), "a round asks for it"
    machine.turn(reconciler)
    machine.jobs.clear()
    assert not reconciler.may_leave(), "its run goes on"
    machine.turn(reconciler)
    machine.parts[0].ends("stopped")
    machine.turn(reconciler)
    assert reconciler.may_leave()
    machine.told_of_notice = False
    assert not reconciler.may_leave(), "nobody knows yet"
    clock.now += 31.0
    assert reconciler.may_leave()
