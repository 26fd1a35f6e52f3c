"""The bucket of a rented cluster: which one it is, whose record is in it, and waiting until it takes writes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gpuctl.cluster import layout
from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.errors import BadInput, StoreError, StoreUnavailable
from gpuctl.cluster.records.clusters import ClusterSpec, Promised
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.interface import Cloud
from gpuctl.stacks.engine.deployment import StateResource
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.providers import ownership
from gpuctl.stacks.providers.interface import Say
from gpuctl.stacks.providers.ownership import agree_on_spec, forget_nodes
from gpuctl.stacks.rented.readiness import pauses_between_looks
from gpuctl.stacks.request.last_request import NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state.clusters import command

_LOOK_S = 2.0
_PATIENCE_S = 600.0
"""A new bucket, and above all the right to write to it, take a while to be known everywhere: Azure says up to ten
minutes (learn.microsoft.com, "Troubleshoot Azure RBAC")."""


class BucketEngine(Protocol):
    """The part of ``Engine`` that this module uses."""

    def resources(self) -> tuple[StateResource, ...]: ...


def state_of(engine: BucketEngine) -> tuple[StateResource, ...]:
    """The resources that the stack knows to be there; none, if there is no stack."""
    try:
        return engine.resources()
    except StackFailed as failed:
        if failed.kind is not FailureKind.NO_STACK:
            raise
        return ()


def reused(
    request: StackRequest,
    there: Cloud,
    state: Sequence[StateResource],
    say: Say,
    *,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> StackRequest:
    """``request``, with the bucket that an earlier cluster of this name has left, for the program to use and not to
    make, if there is one.

    Args:
        request: the cluster, with a bucket of its own or without.
        there: its cloud, where what an interrupted ``up`` has left of a bucket is removed, if the state has forgotten
            it.
        state: what the stack has made already.
        say: is told of what is removed, and waited for.
        now: see ``opened``.
        pause: see ``opened``.

    Raises ``BadInput`` if that bucket is another user's, and as ``opened`` does.
    """
    if request.bucket or _has_bucket(state):
        return request
    if _opens(request.bucket_url()):
        return msgspec.structs.replace(request, bucket=request.bucket_url())
    for one in there.unread_buckets(request):
        if any(known.id.endswith(f"/{one.group}") for known in state):
            continue  # the stack goes on from there
        if one.cluster_id != request.id and not ownership.is_me(one.owner):
            raise BadInput(
                f"{one.group} holds the bucket of {one.owner or 'another user'}'s cluster {one.cluster}",
                "choose another name with --cluster; `gpuctl buckets rm` removes a bucket that nobody needs",
            )
        if one.missing:
            say(f"removing {one.group}: an interrupted `{command('up', request.cluster)}` left no bucket in it")
            there.remove_bucket(one)
        elif there.may_read(request, one):  # as the storage will have heard in a while
            opened(one.url, say, now=now, pause=pause)
            return msgspec.structs.replace(request, bucket=one.url)
        else:
            return msgspec.structs.replace(request, bucket=one.url, lets_in=True)
    return request


def staying(request: StackRequest, before: StackRequest | None, engine: BucketEngine) -> StackRequest:
    """``request``, but with a bucket of its own to make, or to be found, where it was to stay at the one that
    ``before`` made: that never came to be, or its maker was never let in."""
    if before is None or (before.bucket and not before.lets_in) or request.bucket != before.bucket_url():
        return request
    if _has_bucket(state_of(engine)) or _opens(request.bucket):
        return request
    return msgspec.structs.replace(request, bucket="")


def _has_bucket(state: Sequence[StateResource]) -> bool:
    return any(one.type.endswith((":Bucket", ":BlobContainer")) for one in state)


def _opens(url: str) -> bool:
    try:
        open_bucket(url, patience_s=0.0).get(layout.CLUSTER)
    except (StoreError, StoreUnavailable):
        return False
    return True


def opened(
    url: str,
    say: Say,
    *,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Bucket:
    """Open a bucket that was just made, and wait until it takes writes.

    Args:
        url: of the bucket, as ``open_bucket`` takes it.
        say: is told once that the bucket is waited for, and why.
        now: a clock in seconds, for the deadline.
        pause: sleeps for so many seconds between two tries.

    Raises ``StoreError`` or ``StoreUnavailable`` if that takes too long.
    """
    bucket = open_bucket(url)
    until = now() + _PATIENCE_S
    told = False
    for pause_s in pauses_between_looks(_LOOK_S):
        try:
            probe(bucket)
            break
        except (StoreError, StoreUnavailable) as error:
            if now() >= until:
                raise
            if not told:
                say(f"waiting for the new bucket: {error.message}")
            told = True
        pause(pause_s)
    return bucket


def agree(bucket: Bucket, asked: ClusterSpec, *, has_machines: bool) -> None:
    """The cluster's record as ``asked``, but for the secret that its nodes share already. Raises ``BadInput`` if it is
    another cluster's."""
    met = ownership.meet(bucket, asked)
    if not has_machines:
        # Azure numbers the machines of each scale set from 0: another's of the same name may have told of itself.
        forget_nodes(bucket, of=met.id if met else asked.id)
    there = agree_on_spec(bucket, asked, {})
    if there is asked:
        return
    ownership.meet(bucket, asked)  # somebody may have been faster
    renewed = msgspec.structs.replace(asked, token=there.token, created_at=there.created_at)
    bucket.put(layout.CLUSTER, encode(renewed))


def spec_of(request: StackRequest, terms: NodeOptions) -> ClusterSpec:
    """The record that ``request`` asks for, with a new secret for its nodes."""
    machine = catalog().type(request.type, request.provider)
    return ClusterSpec(
        name=request.cluster,
        provider=request.provider,
        nodes_min=request.nodes_min,
        nodes_max=request.nodes_max,
        id=request.id,
        owner=request.owner,
        region=request.region,
        account=request.account,
        slots=terms.slots or machine.gpus or None,
        idle_minutes=terms.idle_minutes,
        stall_minutes=terms.stall_minutes,
        promised=Promised(network_gbps=machine.network_gbps, fabric=machine.fabric, fabric_cards=machine.fabric_cards),
        token=secrets.token_hex(16),
        created_at=time.time(),
    )


def forget(bucket_url: str, of: str) -> None:
    """Delete what nodes told of themselves, and the cluster's record, if it is that of the cluster with the identity
    ``of``. Raises ``GpuctlError`` if the bucket cannot be had."""
    forget_nodes(open_bucket(bucket_url), of=of)
