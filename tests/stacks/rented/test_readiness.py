"""From machines to nodes, as ``up`` and ``repair`` wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.clouds.answers import GroupSize, LaunchProblem
from gpuctl.stacks.clouds.interface import Cloud
from gpuctl.stacks.rented.readiness import CapacityRefused, FleetRequest, FleetWatch, NoCapacity, pauses_between_looks


class OneMachine(Cloud):
    """A cloud whose group has a machine that runs."""

    name = "gcp"

    def program(self, *_: object) -> Mapping[str, object]:
        raise NotImplementedError

    def extras(self, *_: object) -> Any:
        raise NotImplementedError

    def size(self, _: Mapping[str, object]) -> GroupSize:
        return GroupSize(desired=1, running=1, names=("gpuctl-demo-1",))

    def problems(self, _: Mapping[str, object]) -> Sequence[LaunchProblem]:
        return []


class NoMachine(OneMachine):
    """A cloud that gives none, and says why."""

    def __init__(self, *problems: LaunchProblem) -> None:
        self.told = list(problems)

    def size(self, _: Mapping[str, object]) -> GroupSize:
        return GroupSize(desired=2, running=0)

    def problems(self, _: Mapping[str, object]) -> Sequence[LaunchProblem]:
        return list(self.told)


def _beat(bucket: Bucket, incarnation: str, beat: int) -> None:
    record = NodeRecord(node="gpuctl-demo-1", incarnation=incarnation, beat=beat, address="10.0.0.1", port=1)
    bucket.put(layout.node(record.node), encode(record))


def test_what_a_machine_of_the_same_name_wrote_last_is_no_sign_of_life(file_url: str) -> None:
    bucket, said = open_bucket(file_url), list[str]()
    _beat(bucket, "taken", 7)
    looks: list[list[str]] = []

    def pause(_: float) -> None:
        looks.append(list(said))
        if len(looks) == 2:
            _beat(bucket, "its successor", 7)

    arrivals = FleetWatch(OneMachine(), {}, bucket, said.append, now=lambda: 0.0, pause=pause)
    assert arrivals.wait(FleetRequest(1, 1, 60.0)) == 1
    assert looks == [["1 of 1 machines run"]] * 2
    assert said[-1] == "gpuctl-demo-1 is live"


def test_a_node_that_was_there_before_is_seen_to_live_by_its_next_heartbeat(file_url: str) -> None:
    bucket = open_bucket(file_url)
    _beat(bucket, "i", 1)
    beats = iter(range(2, 10))
    arrivals = FleetWatch(
        OneMachine(), {}, bucket, lambda _: None, now=lambda: 0.0, pause=lambda _: _beat(bucket, "i", next(beats))
    )
    assert arrivals.wait(FleetRequest(1, 1, 60.0)) == 1
    assert next(beats) == 3


FULL = LaunchProblem(message="no capacity in us-east-1a", at="10:00")
QUOTA = LaunchProblem(message="MaxSpotInstanceCountExceeded", verdict="stop", at="10:00")


def _wait_for(
    there: NoMachine, bucket: Bucket, told_later: Sequence[LaunchProblem] = ()
) -> tuple[NoCapacity, float, list[str]]:
    """The error, when it came, in seconds, and what was said."""
    clock, said = [0.0], list[str]()

    def pause(seconds: float) -> None:
        clock[0] += seconds
        there.told.extend(problem for problem in told_later if problem not in there.told)

    arrivals = FleetWatch(there, {}, bucket, said.append, now=lambda: clock[0], pause=pause)
    with pytest.raises(NoCapacity) as caught:
        arrivals.wait(FleetRequest(1, 2, 600.0))
    return caught.value, clock[0], said


def test_a_slow_boot_with_a_driver_to_build_is_waited_for_but_not_for_ever(file_url: str) -> None:
    """An image without a driver or torch takes some 20 minutes (BOOT-REVIEW D16)."""
    bucket, clock = open_bucket(file_url), [0.0]

    def pause(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] >= 25 * 60 and waits_for_it:
            _beat(bucket, "slow", 1)

    for waits_for_it in (True, False):
        clock[0] = 0.0
        arrivals = FleetWatch(OneMachine(), {}, bucket, lambda _: None, now=lambda: clock[0], pause=pause)
        if waits_for_it:
            assert arrivals.wait(FleetRequest(1, 1, 60.0)) == 1
        else:
            with pytest.raises(GpuctlError, match="0 of 1 nodes live 30 minutes after the machines started"):
                arrivals.wait(FleetRequest(1, 1, 60.0))


def test_a_reason_is_told_while_machines_are_waited_for(file_url: str) -> None:
    error, at, said = _wait_for(NoMachine(), open_bucket(file_url), [FULL])
    assert at >= 600 and not isinstance(error, CapacityRefused)
    assert said == ["0 of 2 machines run", "no machine yet: no capacity in us-east-1a"]


def test_a_zone_that_never_will_is_given_up_at_once(file_url: str) -> None:
    never = LaunchProblem(message="not sold here", verdict="next zone")
    error, at, _ = _wait_for(NoMachine(), open_bucket(file_url), [never])
    assert at < 60 and not isinstance(error, CapacityRefused) and "not sold here" in error.message


def test_what_no_zone_would_give_ends_the_wait_at_once(file_url: str) -> None:
    error, at, _ = _wait_for(NoMachine(), open_bucket(file_url), [QUOTA])
    assert at < 60 and isinstance(error, CapacityRefused)


def test_problems_of_an_earlier_try_do_not_count(file_url: str) -> None:
    error, at, said = _wait_for(NoMachine(QUOTA), open_bucket(file_url))
    assert at >= 600 and not isinstance(error, CapacityRefused)
    assert "the cloud gives no reason" in error.message and said == ["0 of 2 machines run"]
    again = LaunchProblem(message=QUOTA.message, verdict="stop", at="11:00")
    error, at, _ = _wait_for(NoMachine(QUOTA), open_bucket(file_url), [again])
    assert at < 60 and isinstance(error, CapacityRefused)


def test_looks_are_close_at_first_and_then_every_few_seconds() -> None:
    assert list(islice(pauses_between_looks(3.0), 6)) == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
