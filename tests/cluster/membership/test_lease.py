"""The lease by itself: who may take it, and what each node knows of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.membership.lease import Lease
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.fakes.clock import HandClock

LEASE_S = 3.0


def node(name: str, beat: int = 1) -> NodeRecord:
    return NodeRecord(node=name, incarnation=f"{name}0", beat=beat, address=f"addr-{name}", port=5)


A, B = node("a"), node("b")


@pytest.fixture
def bucket() -> Bucket:
    return open_bucket("memory://")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def lease(bucket: Bucket, clock: HandClock) -> Lease:
    return Lease(bucket, clock, lease_s=LEASE_S)


def beat(bucket: Bucket, record: NodeRecord) -> None:
    bucket.put(layout.node(record.node), encode(record))


def test_nobody_holds_a_new_lease_and_anybody_may_take_it(bucket: Bucket, clock: HandClock) -> None:
    ours = lease(bucket, clock)
    assert not ours.refresh()
    assert (ours.holder, ours.epoch, ours.has_lapsed(), ours.watch()) == (None, 0, True, None)
    assert ours.take(A)
    assert ours.epoch == 1
    assert ours.holder is not None
    assert (ours.holder.node, ours.holder.address, ours.holder.port) == ("a", "addr-a", 5)


def test_of_two_that_take_it_at_once_one_wins_and_the_other_knows_who(bucket: Bucket, clock: HandClock) -> None:
    ours, theirs = lease(bucket, clock), lease(bucket, clock)
    ours.refresh()
    theirs.refresh()
    assert ours.take(A)
    assert not theirs.take(B)
    assert theirs.is_held_by(A)
    assert not theirs.is_held_by(replace(A, incarnation="a1"))


def test_it_lapses_when_the_heartbeat_has_stood_still_for_the_lease_time(bucket: Bucket, clock: HandClock) -> None:
    lease(bucket, clock).take(A)
    beat(bucket, A)
    theirs = lease(bucket, clock)
    theirs.refresh()
    theirs.watch()
    clock.now += LEASE_S
    theirs.watch()
    assert not theirs.has_lapsed()
    clock.now += 0.1
    theirs.watch()
    assert theirs.has_lapsed()


def test_any_change_of_the_heartbeat_renews_it_however_late_it_is_seen(bucket: Bucket, clock: HandClock) -> None:
    lease(bucket, clock).take(A)
    beat(bucket, A)
    theirs = lease(bucket, clock)
    theirs.refresh()
    theirs.watch()
    clock.now += 60 * LEASE_S  # this node slept
    beat(bucket, node("a", 2))
    record = theirs.watch()
    assert record is not None
    assert record.beat == 2
    assert not theirs.has_lapsed()


def test_a_new_holder_has_the_whole_lease_time_to_send_its_first_heartbeat(bucket: Bucket, clock: HandClock) -> None:
    ours, theirs = lease(bucket, clock), lease(bucket, clock)
    ours.take(A)
    theirs.refresh()
    clock.now += LEASE_S + 1
    assert theirs.take(B)
    assert ours.refresh()
    assert ours.is_held_by(B)
    assert ours.epoch == 2
    assert not ours.has_lapsed()


def test_a_refresh_tells_only_of_changes(bucket: Bucket, clock: HandClock) -> None:
    ours, theirs = lease(bucket, clock), lease(bucket, clock)
    ours.take(A)
    assert theirs.refresh()
    assert not theirs.refresh()


def test_a_sleeper_finds_the_holder_though_the_next_version_was_pruned(bucket: Bucket, clock: HandClock) -> None:
    sleeper, others = lease(bucket, clock), lease(bucket, clock)
    sleeper.take(A)
    others.refresh()
    for _ in range(40):
        others.take(B)
    assert any(sleeper.refresh() for _ in range(10))
    assert sleeper.is_held_by(B)
    assert sleeper.epoch == 41


def test_a_sleeper_that_takes_it_again_has_lost_to_whoever_came_meanwhile(bucket: Bucket, clock: HandClock) -> None:
    sleeper, others = lease(bucket, clock), lease(bucket, clock)
    sleeper.take(A)
    others.refresh()
    for _ in range(40):
        others.take(B)
    assert not sleeper.take(A)
    assert sleeper.is_held_by(B)


def test_a_heartbeat_that_nobody_understands_counts_as_none(bucket: Bucket, clock: HandClock) -> None:
    ours = lease(bucket, clock)
    ours.take(A)
    bucket.put(layout.node("a"), b'{"node": 7}')
    assert ours.watch() is None


def test_a_holder_that_beats_seldom_says_so_and_is_waited_for(bucket: Bucket, clock: HandClock) -> None:
    """But not if it is silent as well: then the usual lease counts."""
    ours, theirs = lease(bucket, clock), lease(bucket, clock)
    theirs.take(A)
    beat(bucket, replace(A, lease_s=30.0))
    ours.refresh()
    ours.watch()
    clock.now += LEASE_S + 0.1
    ours.watch()
    assert (ours.has_lapsed(), ours.has_lapsed(silent=True)) == (False, True)
    clock.now += 30.0
    ours.watch()
    assert ours.has_lapsed()
