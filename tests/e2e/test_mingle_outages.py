"""``gpuctl mingle`` while its bucket is away for half a minute, in each phase of a run.

The pods have network namespaces of their own. The bucket is a real S3 server that nothing reaches for a while: requests
wait, as they do behind a broken route, while the pods still reach each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.network import Network, is_possible
from tests.bench.rendezvous.pods import Pods
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root, iproute2 and util-linux"),
]

AWAY_S = 30.0


@pytest.fixture
def pods(tmp_path: Path, switch: Network, bucket: str) -> Iterator[Pods]:
    made = Pods(switch, bucket, tmp_path, "exp1", "2:3")
    yield made
    made.end()


@contextmanager
def away(pods: Pods) -> Iterator[None]:
    """For half a minute at least, and for what is done in it."""
    began = time.monotonic()
    pods.net.hide_switch()
    yield
    time.sleep(max(0.0, began + AWAY_S - time.monotonic()))  # a time without the bucket is what is tested
    pods.net.show_switch()


def says(pods: Pods, machine: int, words: str) -> None:
    until(lambda: words in pods.said(machine), f"{words!r} of pod {machine}")


def come(pods: Pods, number: int) -> list[int]:
    machines = [pods.net.add() for _ in range(number)]
    for machine in machines:
        pods.start(machine)
    return machines


def goes_on(pods: Pods, old: set[int], world: int) -> None:
    """A later round has begun, and its workers make steps."""
    pods.first_step_after(old)
    pods.log.wait_for_steady(world, steps=20, patience_s=120)


def test_pods_that_come_meanwhile_meet_when_it_is_back(pods: Pods) -> None:
    with away(pods):
        machines = come(pods, 2)
        for machine in machines:
            says(pods, machine, "trying again: ")
    pods.log.wait_for_steady(2)


def test_who_waits_meets_those_that_come_meanwhile(pods: Pods) -> None:
    (first,) = come(pods, 1)
    says(pods, first, "1 of 2 to 3 are here")
    with away(pods):
        (second,) = come(pods, 1)
        says(pods, second, "trying again: ")
    pods.log.wait_for_steady(2)


def test_what_runs_goes_on(pods: Pods) -> None:
    come(pods, 3)
    pods.log.wait_for_steady(3)
    began = time.monotonic()
    with away(pods):
        pass
    back = time.monotonic()
    until(lambda: pods.log.steps()[-1].at > back + 15, "steps a while after it is back")
    assert len(pods.log.pids()) == 3, "the same processes"
    assert pods.log.longest_gap(began, back + 15) < 5


@pytest.mark.parametrize("lost", [Pods.rank0, Pods.another])
def test_the_others_of_one_that_is_lost_meanwhile_go_on(pods: Pods, lost: Callable[[Pods], int]) -> None:
    come(pods, 3)
    pods.log.wait_for_steady(3)
    old = pods.log.pids()
    with away(pods):
        pods.kill(lost(pods))
    goes_on(pods, old, 2)
    assert [pods.exit_code(machine) for machine in pods.machines()] == [None, None]


def test_one_that_is_asked_to_leave_meanwhile_leaves_and_the_others_go_on(pods: Pods) -> None:
    come(pods, 3)
    pods.log.wait_for_steady(3)
    old = pods.log.pids()
    leaving = pods.another()
    with away(pods):
        pods.ask_to_end(leaving)
        assert pods.wait_for_end(leaving) == 128 + 15
    goes_on(pods, old, 2)


def test_a_command_that_ends_meanwhile_has_ended(pods: Pods, tmp_path: Path) -> None:
    over = tmp_path / "over"
    command = ["bash", "-c", f"echo begun; until [ -e {over} ]; do sleep 0.1; done; echo done"]
    machines = [pods.net.add() for _ in range(3)]
    for machine in machines:
        pods.start(machine, command=command)
    for machine in machines:
        says(pods, machine, "begun")
    # All three are in one round, or the third has come late: the newest of each is what is asked to end.
    with away(pods):
        over.touch()
        for machine in machines:
            says(pods, machine, "done")
    assert [pods.wait_for_end(machine) for machine in machines] == [0, 0, 0]
