"""A cluster that is taken away, where the cloud and the state do not agree on what there is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.clouds.extras import NotInstalled
from gpuctl.stacks.engine.automation import Engine
from gpuctl.stacks.engine.deployment import InterruptedCreation, StateResource
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.rented.earlier_up import EarlierUp
from gpuctl.stacks.rented.missing_engine import MissingEngine
from gpuctl.stacks.rented.teardown import Teardown
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest
from tests.fakes.tagged import TaggedAccount

NETWORK = Leftover(cluster="demo", kind="network", id="gpuctl-demo", region="", cluster_id="the-one")
SUBNET = Leftover(cluster="demo", kind="subnetwork", id="gpuctl-demo-nodes", region="us-central1", cluster_id="the-one")
REQUEST = StackRequest(
    cluster="demo",
    provider="gcp",
    type="a2-highgpu-8g",
    nodes_min=1,
    nodes_max=1,
    region="us-central1",
    id="the-one",
)


class State:
    """Knows of a network, and that a subnetwork was being made in it, which shows once that is forgotten."""

    def __init__(self, account: TaggedAccount) -> None:
        self._account = account
        self._unknown: tuple[InterruptedCreation, ...] = (
            InterruptedCreation("gcp:compute/subnetwork:Subnetwork", "demo"),
        )

    def unknown(self, **_: bool) -> tuple[InterruptedCreation, ...]:
        return self._unknown

    def forget_unknown(self, **_: bool) -> None:
        self._unknown = ()
        self._account.there.append(SUBNET)

    def resources(self) -> tuple[StateResource, ...]:
        known = StateResource(
            "gcp:compute/network:Network", "demo", id="projects/p/global/networks/gpuctl-demo", region=REQUEST.region
        )
        return (known,) if NETWORK in self._account.there else ()

    def destroy(self, **_: bool) -> None:
        if SUBNET in self._account.there:
            raise StackFailed(FailureKind.RESOURCE, "the network is already being used by the subnetwork")
        self._account.there.remove(NETWORK)

    def refresh(self, **_: bool) -> None:
        raise NotImplementedError

    def up(self, request: StackRequest, *, force: bool = False) -> dict[str, Any]:
        raise NotImplementedError

    def outputs(self) -> dict[str, Any]:
        raise KeyError("zones")

    def forget(self) -> None:
        raise NotImplementedError

    def orphaned_plugins(self) -> list[psutil.Process]:
        return []


def test_resource_that_shows_late_is_removed_before_the_next_try() -> None:
    """Its creation was with the cloud when engine and plug-in were killed: a scan right after that does not see it."""
    account, said, waited = TaggedAccount("gcp", NETWORK), list[str](), list[float]()
    left = Teardown(REQUEST, account, State(account), said.append, pause=waited.append, now=lambda: 0.0).all()
    assert (left.found, account.there) == ((), [])
    assert waited == [10.0], "not the five minutes of all tries"
    assert "deleted subnetwork gpuctl-demo-nodes" in said


def test_region_that_the_state_knows_is_looked_into_too() -> None:
    account = TaggedAccount("gcp", NETWORK)
    elsewhere = replace(REQUEST, region="europe-west4")
    left = Teardown(elsewhere, account, State(account), lambda _: None, pause=lambda _: None, now=lambda: 0.0).all()
    assert (left.found, account.there) == ((), [])
    assert left.regions == ("europe-west4", "us-central1")


def test_what_only_has_the_name_of_something_known_is_removed_before_the_first_try() -> None:
    """As on Google Cloud, where the network and the group of machines in it are called the same."""
    paths = "projects/p/global/networks/gpuctl-demo", "projects/p/zones/z/instanceGroupManagers/gpuctl-demo"
    network, group = (
        replace(NETWORK, kind=kind, ref=ref) for kind, ref in zip(("network", "instance group"), paths, strict=True)
    )
    account, waited = TaggedAccount("gcp", network, group), list[float]()

    class Full(State):
        def forget_unknown(self, **_: bool) -> None: ...

        def destroy(self, **_: bool) -> None:
            if group in account.there:
                raise StackFailed(FailureKind.RESOURCE, "the template is already being used by the group")
            account.there.remove(network)

        def resources(self) -> tuple[StateResource, ...]:
            return (StateResource("gcp:compute/network:Network", "demo", id=paths[0]),)

    left = Teardown(REQUEST, account, Full(account), print, pause=waited.append, now=lambda: 0.0).all()
    assert (left.found, account.there, waited) == ((), [], [])


def test_what_a_namesake_has_made_since_is_not_removed_by_its_name() -> None:
    """The cluster was taken down by tag elsewhere, and another one of its name made: the state here is old."""
    theirs = replace(NETWORK, cluster_id="another")
    account, forgotten = TaggedAccount("gcp", theirs, SUBNET), list[bool]()

    class Old(State):
        def unknown(self, **_: bool) -> tuple[InterruptedCreation, ...]:
            return ()

        def resources(self) -> tuple[StateResource, ...]:
            return (StateResource("gcp:compute/network:Network", "demo", id="projects/p/global/networks/gpuctl-demo"),)

        def destroy(self, **_: bool) -> None:
            account.there.remove(theirs)

        def forget(self) -> None:
            forgotten.append(True)

    left = Teardown(REQUEST, account, Old(account), print, pause=lambda _: None, now=lambda: 0.0).all()
    assert (left.found, account.there, forgotten) == ((theirs,), [theirs], [True])


class Ignorant(State):
    """Knows that something was being made, and of nothing that is there."""

    def resources(self) -> tuple[StateResource, ...]:
        return ()

    def forget_unknown(self, **_: bool) -> None: ...
    def destroy(self, **_: bool) -> None: ...


@pytest.mark.parametrize(
    ("there", "unseen", "raised"),
    [((SUBNET,), (), ""), ((), ("instances in us-central1: denied",), "could not check instances")],
    ids=["seen", "not to be seen"],
)
def test_up_elsewhere_first_removes_what_an_interrupted_one_left_where_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[Leftover, ...],
    unseen: tuple[str, ...],
    raised: str,
) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path))
    last_request.remember(LastRequest(request=REQUEST, terms=NodeOptions()))
    account = TaggedAccount("gcp", *there)
    account.unseen = unseen
    state = Ignorant(account)

    def teardown(request: StackRequest) -> Teardown:
        return Teardown(request, account, state, lambda _: None, pause=lambda _: None, now=lambda: 0.0)

    earlier = EarlierUp(account, state, teardown, lambda _: None)
    with pytest.raises(GpuctlError, match=raised) if raised else nullcontext():
        earlier.settle(replace(REQUEST, region="europe-west4"), None, force=False)
    assert account.there == []


def test_state_that_cannot_be_used_keeps_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full."""
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path))
    (tmp_path / "pulumi").mkdir()
    (tmp_path / "pulumi" / "demo").touch()
    account, said = TaggedAccount("gcp", NETWORK, SUBNET), list[str]()
    left = Teardown(REQUEST, account, Engine("demo"), said.append, pause=lambda _: None, now=lambda: 0.0).all()
    assert (left.found, account.there) == ((), [])
    assert "removing resources by tag" in said


def test_a_missing_package_of_pulumis_keeps_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path))
    (tmp_path / "pulumi" / "demo" / "state").mkdir(parents=True)
    account, said = TaggedAccount("gcp", NETWORK, SUBNET), list[str]()
    engine = MissingEngine("demo", NotInstalled("this needs pulumi, which is not installed", "pip install it"))
    left = Teardown(REQUEST, account, engine, said.append, pause=lambda _: None, now=lambda: 0.0).all()
    assert (left.found, account.there) == ((), [])
    assert said[:2] == ["this needs pulumi, which is not installed", "removing resources by tag"]
    assert not (tmp_path / "pulumi" / "demo").exists()
