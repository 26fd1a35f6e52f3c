"""Clusters of rented machines: made, changed, mended and taken away, on whichever cloud.

``engine`` changes what Pulumi declares; what is not Pulumi's is here: gpuctl in the bucket before the first machine,
the number of machines, the next zone where one gives none, and the proof that nothing is left.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from gpuctl.bootstrap import user_data
from gpuctl.bootstrap.node_spec import NodeSpec, Package, Promise
from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Bucket, open_bucket, probe
from gpuctl.cluster.errors import BadInput, StoreError, StoreUnavailable
from gpuctl.cluster.records import ClusterSpec, Promised, encode
from gpuctl.stacks import known, last_up, package, ssh_config
from gpuctl.stacks.arrivals import Arrivals, NoCapacity, Wanted, pauses_between_looks
from gpuctl.stacks.cloud import Cloud, NoGroup, cloud
from gpuctl.stacks.failures import Failure, StackFailed
from gpuctl.stacks.gcp import NOTICE_S
from gpuctl.stacks.hosts import read_hosts
from gpuctl.stacks.known import KnownCluster
from gpuctl.stacks.last_up import LastUp, NodeTerms
from gpuctl.stacks.machines import MachineType, catalog
from gpuctl.stacks.provider import Say, agree_on_spec, forget_nodes
from gpuctl.stacks.request import StackRequest
from gpuctl.stacks.standing import for_good, refuse_changes

_LATE_S = (10.0, 20.0, 40.0, 80.0, 160.0)
"""Between tries to destroy: a placement group goes after its machines have, a network after its cards have."""
_BUCKET_LOOK_S = 2.0
_BUCKET_S = 600.0
"""A new bucket, and above all the right to write to it, take a while to be known everywhere: Azure says up to ten
minutes (learn.microsoft.com, "Troubleshoot Azure RBAC")."""


class Changes(Protocol):
    """What ``engine.Engine`` does for this module."""

    def up(self, request: StackRequest, *, force: bool = False) -> dict[str, Any]: ...
    def refresh(self, *, force: bool = False) -> None: ...
    def destroy(self, *, force: bool = False) -> None: ...
    def outputs(self) -> dict[str, Any]: ...
    def resources(self) -> tuple[str, ...]: ...


class Rented:
    """Of one cloud."""

    def __init__(
        self,
        engine: Callable[[str], Changes],
        say: Say,
        *,
        backend: str = "",
        pause: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine`` gives that of a cluster by its name; ``backend`` is where its state is (see ``last_up``)."""
        self._engine = engine
        self._backend = backend
        self._say = say
        self._pause = pause
        self._now = now

    def up(
        self,
        request: StackRequest,
        terms: NodeTerms,
        *,
        wait_s: float,
        force: bool = False,
        confirm: Callable[[], None] = lambda: None,
    ) -> KnownCluster:
        """Make the cluster, or what is missing of it, in the first zone that gives enough machines within ``wait_s``.

        ``confirm`` is called once nothing speaks against it any more, before anything is made; it may raise.

        A cluster whose machines run stays as it is but for their number: ``BadInput`` if it was asked to be elsewhere,
        of another type or at another bucket. Raises ``GpuctlError``; what is there then is known to the stack, so that
        the next ``up`` goes on from it and ``down`` removes it.
        """
        there = cloud(request.provider)
        request = msgspec.structs.replace(
            request,
            account=request.account or there.account(request.region),
            reader=request.reader or there.reader(),
        )
        engine = self._engine(request.cluster)
        home = _zones_in_use(there, engine)
        places = self._places(request, there, home)
        confirm()
        for number, zones in enumerate(places):
            here = msgspec.structs.replace(request, zones=zones)
            if home is None:
                self._leave(here, engine, force)
            try:
                return self._up_in(here, terms, there, engine, wait_s=wait_s, force=force)
            except NoCapacity as error:
                if home is not None:
                    raise NoCapacity(error.message, "wait longer (--wait), or ask for fewer (--nodes)") from error
                there.resize(engine.outputs(), 0)  # none comes when nobody waits for it any more
                if number + 1 == len(places):
                    raise NoCapacity(error.message, _otherwise(request)) from error
                self._say(f"{_place(here)}: {error.message}")
                self._say(f"giving up {_place(here)}, next is {', '.join(places[number + 1])}")
        raise AssertionError("no zone was tried")

    def down(self, request: StackRequest, *, force: bool = False) -> list[str]:
        """Take everything away but the bucket, then look by tag, whatever Pulumi's state knows. Names what is left."""
        there = cloud(request.provider)
        mine = there.account(request.region)
        if request.account not in ("", mine):
            # A scan of another account finds nothing, and proves nothing.
            raise BadInput(
                f"{request.cluster} is in account {request.account}, and these credentials are of {mine}",
                "log in to that one",
            )
        try:
            self._destroy(self._engine(request.cluster), force)
        except StackFailed as failed:
            # Nothing that Pulumi knows of; the cloud may know of something.
            if failed.kind is not Failure.NO_STACK:
                raise
            self._say(failed.message)
        scan = there.leftovers([request.region], request.cluster)
        left = [
            f"{one.kind} {one.id} in {one.region or request.provider}"
            + (f", ${one.usd_per_hour:.4g}/h" if one.usd_per_hour else "")
            for one in scan.found
        ]
        left += [f"not seen: {line}" for line in scan.unseen]
        if not left:
            _forget(request)
        return left

    def repair(self, last: LastUp, *, wait_s: float, force: bool = False) -> KnownCluster:
        """Have the cloud's own view in the state, then everything that is missing again, machines too."""
        self._engine(last.request.cluster).refresh(force=force)
        return self.up(last.request, last.terms, wait_s=wait_s, force=force)

    def _places(self, request: StackRequest, there: Cloud, home: tuple[str, ...] | None) -> list[tuple[str, ...]]:
        """The zones to be tried, one after the other; only ``home``, if there are machines."""
        if home is not None:
            refuse_changes(last_up.of(request.cluster).request, request, home)
            return [home]
        if request.zones or not there.first_zone:
            return [request.zones]
        zones = there.zones(request)
        if not zones:
            raise BadInput(f"there is no {request.type} in {request.region}", "take another --region or --type")
        self._say(f"zones to try: {', '.join(zones)}")
        return [(zone,) for zone in zones]

    def _up_in(
        self, request: StackRequest, terms: NodeTerms, there: Cloud, engine: Changes, *, wait_s: float, force: bool
    ) -> KnownCluster:
        """In the one zone of ``request``."""
        machine = catalog().type(request.type, request.provider)
        built = package.build()
        url = request.bucket_url()
        request = msgspec.structs.replace(told(request, built.package, terms), bucket=_kept(request, engine))
        made = KnownCluster(name=request.cluster, provider=request.provider, bucket=url, created_at=time.time())
        last_up.remember(LastUp(request=request, terms=terms, backend=self._backend))
        known.remember(made)
        outputs = engine.up(request, force=force)
        bucket = self._opened(str(outputs["bucket"]))
        if not there.size(outputs).names:
            # Azure numbers the machines of each scale set from 0: another's of the same name may have told of itself.
            forget_nodes(bucket)
        package.send(bucket, built)
        _agree(bucket, _cluster_spec(request, machine, terms))
        there.resize(outputs, request.nodes_max)
        self._say(f"{_place(request)}: asked for {request.nodes_max} x {request.type}")
        wanted = Wanted(max(1, request.nodes_min), request.nodes_max, wait_s)
        arrivals = Arrivals(there, outputs, bucket, self._say, now=self._now, pause=self._pause)
        arrivals.wait(wanted)
        ssh_config.write(request.cluster, read_hosts(bucket))
        return made

    def _leave(self, request: StackRequest, engine: Changes, force: bool) -> None:
        """What was made before, and has got no machines, goes first if it was for others than these or elsewhere: much
        of it cannot be changed. The bucket stays."""
        before = last_up.find(request.cluster)
        if before is None or for_good(before.request) == for_good(request) or not _resources(engine):
            return
        self._destroy(engine, force)
        self._say(f"{_place(before.request)} is cleared")

    def _destroy(self, engine: Changes, force: bool) -> None:
        for late_s in _LATE_S:
            try:
                engine.destroy(force=force)
                return
            except StackFailed as failed:
                if failed.kind not in (Failure.RESOURCE, Failure.LEFT):
                    raise
                self._say(f"not yet: {failed.message}; trying again in {late_s:.0f} s")
            self._pause(late_s)
        engine.destroy(force=force)

    def _opened(self, url: str) -> Bucket:
        bucket = open_bucket(url)
        until = self._now() + _BUCKET_S
        told = False
        pauses = pauses_between_looks(_BUCKET_LOOK_S)
        while True:
            try:
                probe(bucket)
                return bucket
            except (StoreError, StoreUnavailable) as error:
                if self._now() >= until:
                    raise
                if not told:
                    self._say(f"waiting for the new bucket: {error.message}")
                told = True
            self._pause(next(pauses))


def told(request: StackRequest, gpuctl: Package, terms: NodeTerms) -> StackRequest:
    """``request`` with what its machines are told when they boot."""
    machine = catalog().type(request.type, request.provider)
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
        notice_s=NOTICE_S if request.provider == "gcp" else 30.0,
    )
    return msgspec.structs.replace(request, user_data=user_data.render(spec))


def _forget(request: StackRequest) -> None:
    """Nothing of the cluster is left but its bucket, and there nothing but what jobs have left."""
    with contextlib.suppress(StoreError, StoreUnavailable):  # it may never have come to be
        forget_nodes(open_bucket(request.bucket_url()))
    last_up.forget(request.cluster)
    known.forget(request.cluster)


def _zones_in_use(there: Cloud, engine: Changes) -> tuple[str, ...] | None:
    """Of machines that there are: they stay where they are. Raises ``GpuctlError`` if the cloud does not tell of them:
    elsewhere, others would be made in their place."""
    try:
        outputs: Mapping[str, Any] = engine.outputs()
        return tuple(outputs["zones"]) if there.size(outputs).names else None
    except StackFailed as failed:
        if failed.kind is Failure.NO_STACK:
            return None
        raise
    except (NoGroup, KeyError):  # half made: no group yet, or none any more
        return None


def _otherwise(request: StackRequest) -> str:
    """What to do where no place had machines."""
    other = f"name another {'--zone' if request.zones else '--region'} or --type"
    return f"wait longer (--wait), {other}, or --on-demand" if request.spot else f"wait longer (--wait), or {other}"


def _resources(engine: Changes) -> tuple[str, ...]:
    """What the stack knows to be there; nothing, if there is no stack."""
    try:
        return engine.resources()
    except StackFailed as failed:
        if failed.kind is not Failure.NO_STACK:
            raise
        return ()


def _kept(request: StackRequest, engine: Changes) -> str:
    """The URL of the bucket that an earlier cluster of this name has left, for the program to use and not to make."""
    if request.bucket:
        return request.bucket
    if any(line.rpartition(" ")[0].endswith((":Bucket", ":BlobContainer")) for line in _resources(engine)):
        return ""  # the stack's own
    try:
        open_bucket(request.bucket_url(), patience_s=0.0).get(layout.CLUSTER)
    except (StoreError, StoreUnavailable):
        return ""
    return request.bucket_url()


def _agree(bucket: Bucket, asked: ClusterSpec) -> None:
    """The cluster's record as ``asked``, but for the secret that its nodes share already."""
    there = agree_on_spec(bucket, asked, {})
    if there is not asked:
        renewed = msgspec.structs.replace(asked, token=there.token, created_at=there.created_at)
        bucket.put(layout.CLUSTER, encode(renewed))


def _cluster_spec(request: StackRequest, machine: MachineType, terms: NodeTerms) -> ClusterSpec:
    return ClusterSpec(
        name=request.cluster,
        provider=request.provider,
        nodes_min=request.nodes_min,
        nodes_max=request.nodes_max,
        slots=terms.slots or machine.gpus or None,
        idle_minutes=terms.idle_minutes,
        stall_minutes=terms.stall_minutes,
        promised=Promised(network_gbps=machine.network_gbps, fabric=machine.fabric, fabric_cards=machine.fabric_cards),
        token=secrets.token_hex(16),
        created_at=time.time(),
    )


def _place(request: StackRequest) -> str:
    return ", ".join(request.zones) or request.region
