"""Clusters of rented machines: made, changed, repaired and taken away, on whichever cloud.

``automation`` changes what Pulumi declares; what is not Pulumi's is here: whose the cluster is, gpuctl in the bucket
before the first machine, the number of machines, and the next zone where one gives none. ``teardown`` takes all away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gpuctl.bootstrap.node_spec import NodeSpec, Package, Promise
from gpuctl.bootstrap.user_data import render
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.clouds.eventual import is_eventual
from gpuctl.stacks.clouds.interface import Cloud, cloud
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.providers import node_package, ownership
from gpuctl.stacks.providers.interface import Say
from gpuctl.stacks.rented import cluster_bucket
from gpuctl.stacks.rented.cluster_bucket import state_of
from gpuctl.stacks.rented.earlier_up import EarlierUp, UpEngine, question
from gpuctl.stacks.rented.namesakes import refuse_attached, refuse_namesake, refuse_other_account
from gpuctl.stacks.rented.readiness import CapacityRefused, FleetRequest, FleetWatch, NoCapacity
from gpuctl.stacks.rented.remains import telling_what_is_there, what_is_there
from gpuctl.stacks.rented.teardown import Teardown
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.immutable import refuse_changes
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.ssh import config
from gpuctl.stacks.ssh.hosts import read_hosts
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster, command

_EVENTUALLY_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Between tries, while a role or an account that was just made is not known everywhere."""


class RentedClusters:
    """Nodes rented from one cloud.

    Args:
        engine: makes the engine of a cluster, by its name.
        say: prints a line of progress.
        backend: URL of Pulumi's state (see ``last_request``); empty: a folder on this machine.
        pause: sleeps for so many seconds between two looks or tries.
        now: a clock in seconds, for the deadlines.
    """

    def __init__(
        self,
        engine: Callable[[str], UpEngine],
        say: Say,
        *,
        backend: str = "",
        pause: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._say = say
        self._pause = pause
        self._now = now

    def up(
        self,
        request: StackRequest,
        terms: NodeOptions,
        *,
        wait_s: float,
        force: bool = False,
        refresh: bool = False,
        confirm: Callable[[str], None] = lambda _: None,
    ) -> KnownCluster:
        """Make the cluster, or what is missing of it, in the first zone that gives enough machines.

        Args:
            request: the whole cluster; if it names no zone, those of its region, if it has any, are tried one after
                the other.
            terms: options of its nodes besides their place.
            wait_s: seconds that each zone has to start the machines.
            force: clear a lock that another machine has left.
            refresh: first bring the state up to date with the cloud.
            confirm: is asked once nothing speaks against it any more, before anything is made, with the question for
                the user; it may raise.

        A cluster whose machines run stays as it is but for their number: ``BadInput`` if it was asked to be elsewhere,
        of another type or at another bucket. Raises ``GpuctlError``; what is there then is known to the stack or by its
        tags, so that the next ``up`` goes on from it and ``down`` removes it. The error tells what that is and costs.
        """
        there = cloud(request.provider)
        account = request.account or there.account(request.region)
        before = last_request.find(request.cluster)
        if noted := clusters.get(request.cluster):  # an attached one may be a colleague's
            refuse_other_account(request.cluster, noted.account, account)
            refuse_attached(noted, before)
        request = msgspec.structs.replace(request, account=account, reader=request.reader or there.reader())
        engine = self._engine(request.cluster)
        if before is None or request.id:  # of a time before identities: its own things carry none
            refuse_namesake(there.leftovers([request.region], request.cluster), request, is_new=before is None)
        request = cluster_bucket.staying(request, before.request if before else None, engine)
        request = msgspec.structs.replace(request, bucket_group=there.bucket_group(request) if request.bucket else "")
        earlier = EarlierUp(there, engine, lambda of: self._teardown(of, there), self._say)
        home, is_gone = earlier.home(before.request if before else None)
        places = self._places(request, there, home)
        is_down = is_gone and self._teardown(before.request if before else request, there).is_done()
        confirm(question(is_gone=is_gone, is_down=is_down, is_repair=refresh))
        if is_down:
            request = earlier.forget(request)
        regions.note_used(request.provider, request.region)
        with telling_what_is_there(there, request, self._say):
            if (is_gone or refresh) and not is_down:
                engine.refresh(force=force)
            return self._up(request, terms, earlier, places, home, wait_s=wait_s, force=force)

    def down(self, request: StackRequest, *, force: bool = False) -> list[str]:
        """Take everything away but the bucket, then look by tag, whatever Pulumi's state knows. Names what is left."""
        there = cloud(request.provider)
        refuse_other_account(request.cluster, request.account, there.account(request.region))
        try:
            scan = self._teardown(request, there).all(force=force)
        except OSError as error:
            raise GpuctlError(
                f"the removal of {request.cluster} failed: {error}",
                f"run `{command('down', request.cluster)}` again ({what_is_there(there, request)})",
            ) from error
        except (KeyboardInterrupt, StackFailed) as error:
            if isinstance(error, StackFailed) and error.kind is not FailureKind.CANCELLED:
                raise
            raise StackFailed(
                FailureKind.CANCELLED,
                f"the removal of {request.cluster} was interrupted: {what_is_there(there, request)}",
                f"run `{command('down', request.cluster)}` again to go on",
            ) from error
        others = [one for one in scan.found if one.cluster_id not in ("", request.id)]
        for one in others:
            whose = f"of {one.owner}'s" if one.owner else "of another"
            self._say(f"not removed: {one.kind} {one.id}, {whose} cluster {one.cluster} ({one.cluster_id})")
        left = [
            f"{one.kind} {one.id} in {one.region or request.provider}"
            + (f", ${one.usd_per_hour:.4g}/h" if one.usd_per_hour else "")
            for one in scan.found
            if one not in others
        ]
        left += [f"could not check {line}" for line in scan.unseen]
        if not left:
            try:
                _forget(request)
            except OSError as error:
                self._say(f"everything is removed, but {error.filename} cannot be deleted: {error.strerror}")
        return left

    def repair(
        self, last: LastRequest, *, wait_s: float, force: bool = False, confirm: Callable[[str], None] = lambda _: None
    ) -> KnownCluster:
        """Bring the state up to date with the cloud, then make everything that is missing, machines too.

        Args:
            last: what the cluster was asked for last.
            wait_s: seconds that each zone has to start the machines.
            force: clear a lock that another machine has left.
            confirm: is asked before anything is changed, with the question for the user; it may raise.
        """
        return self.up(last.request, last.terms, wait_s=wait_s, force=force, refresh=True, confirm=confirm)

    def _up(
        self,
        request: StackRequest,
        terms: NodeOptions,
        earlier: EarlierUp,
        places: list[tuple[str, ...]],
        home: tuple[str, ...] | None,
        *,
        wait_s: float,
        force: bool,
    ) -> KnownCluster:
        there, engine = earlier.there, earlier.engine
        earlier.settle(request, home, force)
        for number, zones in enumerate(places):
            here = msgspec.structs.replace(request, zones=zones)
            if home is None:
                earlier.make_way(here, force)
            try:
                return self._up_in(here, terms, there, engine, wait_s=wait_s, force=force)
            except NoCapacity as error:
                if home is not None:
                    raise NoCapacity(error.message, "wait longer (--wait), or ask for fewer (--nodes)") from error
                there.resize(engine.outputs(), 0)  # none comes when nobody waits for it any more
                if isinstance(error, CapacityRefused):
                    raise
                if number + 1 == len(places):
                    raise NoCapacity(error.message, _otherwise(request)) from error
                self._say(f"{here.where()}: {error.message}")
                self._say(f"giving up {here.where()}, next is {', '.join(places[number + 1])}")
        raise AssertionError("no zone could be tried")

    def _teardown(self, request: StackRequest, there: Cloud) -> Teardown:
        return Teardown(request, there, self._engine(request.cluster), self._say, pause=self._pause, now=self._now)

    def _places(self, request: StackRequest, there: Cloud, home: tuple[str, ...] | None) -> list[tuple[str, ...]]:
        """The zones to be tried, one after the other; only ``home``, if there are machines."""
        if home is not None:
            refuse_changes(last_request.of(request.cluster).request, request, home)
            return [home]
        if request.zones or not there.first_zone:
            return [request.zones]
        zones = there.zones(request)
        if not zones:
            raise BadInput(f"{request.type} is not offered in {request.region}", "use another --region or --type")
        self._say(f"zones to try: {', '.join(zones)}")
        return [(zone,) for zone in zones]

    def _up_in(
        self, request: StackRequest, terms: NodeOptions, there: Cloud, engine: UpEngine, *, wait_s: float, force: bool
    ) -> KnownCluster:
        """Bring the cluster up in the one zone of ``request``."""
        built = node_package.build()
        request = cluster_bucket.reused(request, there, state_of(engine), self._say, now=self._now, pause=self._pause)
        request = with_user_data(request, built.package, terms)
        spec = cluster_bucket.spec_of(request, terms)
        made = last_request.noted(request, created_at=time.time())
        if request.bucket and not request.lets_in:  # before anything is made, and before `down` takes it for ours
            ownership.meet(open_bucket(made.bucket), spec, self._say)
        begun = LastRequest(request=request, terms=terms, backend=self._backend, is_done=False)
        last_request.remember(begun)
        clusters.remember(made)
        outputs = self._made(request, engine, force)
        bucket = cluster_bucket.opened(str(outputs["bucket"]), self._say, now=self._now, pause=self._pause)
        cluster_bucket.agree(bucket, spec, has_machines=bool(there.size(outputs).names))
        node_package.send(bucket, built)
        arrivals = FleetWatch(there, outputs, bucket, self._say, now=self._now, pause=self._pause)
        there.resize(outputs, request.nodes_max)
        self._say(f"{request.where()}: asked for {request.nodes_max} x {request.type}")
        wanted = FleetRequest(max(1, request.nodes_min), request.nodes_max, wait_s)
        arrivals.wait(wanted)
        config.write(request.cluster, read_hosts(bucket))
        last_request.remember(msgspec.structs.replace(begun, is_done=True))
        return made

    def _made(self, request: StackRequest, engine: UpEngine, force: bool) -> dict[str, Any]:
        """The stack's outputs. What a cloud refuses only because something that was made a moment ago is not known
        everywhere yet, is tried again."""
        for pause_s in _EVENTUALLY_S:
            try:
                return engine.up(request, force=force)
            except StackFailed as failed:
                if not failed.refusals or not all(is_eventual(one.said) for one in failed.refusals):
                    raise
                self._say(f"{failed.message}; trying again in {pause_s:.0f} s")
            self._pause(pause_s)
        return engine.up(request, force=force)


def _forget(request: StackRequest) -> None:
    """Nothing of the cluster is left but its bucket, and there nothing but what jobs have left."""
    with contextlib.suppress(GpuctlError):  # it may never have come to be, or be gone
        cluster_bucket.forget(request.bucket_url(), request.id)
    last_request.forget_all(request.cluster)
    clusters.forget(request.cluster)


def with_user_data(request: StackRequest, gpuctl: Package, terms: NodeOptions) -> StackRequest:
    """``request`` with what its machines are told when they boot."""
    machine, there = catalog().type(request.type, request.provider), cloud(request.provider)
    spec = NodeSpec(
        cluster=request.cluster,
        provider=request.provider,
        bucket=request.bucket_url(),
        package=gpuctl,
        promise=Promise(
            gpus=machine.gpus,
            gpu_memory_gb=machine.gpu_memory_gb,
            fabric=machine.fabric,
            fabric_cards=machine.fabric_cards,
        ),
        region=request.region,
        type=machine.name,
        idle_minutes=terms.idle_minutes,
        hold_ill_minutes=terms.hold_ill_minutes,
        notice_s=there.notice_s,
        shutdown_s=there.shutdown_s(request),
        env=dict(there.node_env(request)),
    )
    return msgspec.structs.replace(request, user_data=render.render(spec))


def _otherwise(request: StackRequest) -> str:
    """The hint where no place had machines."""
    other = f"use another {'--zone' if request.zones else '--region'} or --type"
    return f"wait longer (--wait), {other}, or --on-demand" if request.spot else f"wait longer (--wait), or {other}"
