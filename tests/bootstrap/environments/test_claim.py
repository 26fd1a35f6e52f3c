"""Who builds an environment: one node, until it shows for too long that it is not at it."""

from __future__ import annotations

from msgspec.structs import replace

from gpuctl.bootstrap.environments.claim import BuildClaim
from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.environments import Environment, EnvironmentBuild, PackedFiles
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes.clock import HandClock

ONE = EnvironmentBuild(node="node-1", incarnation="a", beat=0, address="127.0.0.1:1")
TWO = replace(ONE, node="node-2")
BUILT = Environment(digest="d", file="f", packages={}, bytes=1, files=1, pack=PackedFiles(sha256="s", bytes=1))


def test_one_node_builds_and_the_next_one_when_it_has_gone() -> None:
    store, clock = open_bucket("memory://"), HandClock()
    first, second = (BuildClaim(store, "r", own, clock) for own in (ONE, TWO))
    assert first.take() and not second.take()
    clock.now += 29
    assert not second.take()
    clock.now += 2
    assert second.take(), "31 s without a beat"
    assert second.holder() == TWO


def test_a_node_that_shows_that_it_is_at_it_keeps_it() -> None:
    store, clock = open_bucket("memory://"), HandClock()
    first, second = (BuildClaim(store, "r", own, clock) for own in (ONE, TWO))
    first.take()
    second.take()
    for _ in range(5):
        clock.now += 20
        first.tell_built(BUILT)  # any beat
        assert not second.take()
    holder = second.holder()
    assert holder and holder.built == BUILT and holder.beat == 5


def test_a_claim_that_is_released_is_free() -> None:
    store, clock = open_bucket("memory://"), HandClock()
    first, second = (BuildClaim(store, "r", own, clock) for own in (ONE, TWO))
    assert first.take()
    first.hold()
    first.release()
    assert second.holder() is None and second.take()


def test_a_later_life_of_the_same_node_takes_over_at_once() -> None:
    store, clock = open_bucket("memory://"), HandClock()
    assert BuildClaim(store, "r", ONE, clock).take()
    assert BuildClaim(store, "r", replace(ONE, incarnation="b"), clock).take()
    data = store.get(layout.environment_build("r"))
    assert data and decode(data, EnvironmentBuild, "").incarnation == "b"


def test_what_another_version_of_gpuctl_wrote_is_taken_over() -> None:
    store, clock = open_bucket("memory://"), HandClock()
    store.put(layout.environment_build("r"), b"{}")
    claim = BuildClaim(store, "r", ONE, clock)
    assert not claim.take()
    clock.now += 31
    assert claim.take()
