"""What a provider answers, and the table of those there are.

A provider makes machines that run the agent and takes them away; everything else (jobs, logs, checkpoints, status)
goes through the bucket and is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from gpuctl.cluster import layout, stays
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records import ClusterSpec, decode, encode
from gpuctl.stacks.known import KnownCluster

Say = Callable[[str], None]
"""Takes one line of progress, for a person."""


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What ``gpuctl up`` was asked for."""

    name: str
    nodes_min: int
    nodes_max: int
    slots: int | None = None
    """Worker processes per node; ``None``: the GPUs found, else 1."""
    bucket: str | None = None
    """URL of the bucket and prefix for the cluster; ``None``: the provider makes or chooses one."""
    hosts: tuple[str, ...] = ()
    """Only of provider ssh: the machines, as ``[USER@]HOST[:PORT]``."""
    stall_minutes: float = 30.0
    """See ``ClusterSpec``."""


class Provider(Protocol):
    """All verbs may be repeated: what is already so stays so."""

    def up(self, request: UpRequest, say: Say) -> KnownCluster:
        """Make the cluster, or what is missing of it, and wait until its nodes are live.

        Raises ``BadInput`` if a cluster of this name exists in another size.
        """
        ...

    def down(self, cluster: KnownCluster, say: Say, *, force: bool = False) -> list[str]:
        """Take everything away but the bucket, then look without relying on what was noted: names what is left.
        ``force``: what cannot be reached is forgotten."""
        ...

    def preempt(
        self, cluster: KnownCluster, node: str, notice_s: float, replace_after_s: float | None, say: Say
    ) -> None:
        """Take a node away as a cloud would: a notice, ``notice_s`` later an end without mercy (at once if 0), and a
        replacement after ``replace_after_s`` seconds (``None``: never). Returns when that has happened."""
        ...


_PROVIDERS = {"local": "gpuctl.stacks.local:LocalProvider", "ssh": "gpuctl.stacks.ssh:SshProvider"}


def provider(name: str) -> Provider:
    """Raises ``BadInput`` naming the providers there are."""
    if name not in _PROVIDERS:
        raise BadInput(f"unknown provider {name!r}", f"use one of: {', '.join(_PROVIDERS)}")
    module, _, attribute = _PROVIDERS[name].partition(":")
    made: Provider = getattr(import_module(module), attribute)()
    return made


def agree_on_spec(
    bucket: Bucket, asked: ClusterSpec, fixed: Mapping[str, Callable[[ClusterSpec], object]]
) -> ClusterSpec:
    """The cluster's record: ``asked`` itself, or the one that is there already. Raises ``BadInput`` where something of
    that which is ``fixed``, by what to call it, is another in the two."""
    if bucket.create(layout.CLUSTER, encode(asked)):
        return asked
    there = decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)
    for what, of in fixed.items():
        if of(there) != of(asked):
            raise BadInput(
                f"cluster {there.name!r} exists with {what}={of(there)}, not {of(asked)}",
                "run `gpuctl down` first, or choose another name with --cluster",
            )
    return there


def forget_nodes(bucket: Bucket) -> None:
    """Of a cluster that is gone: what its machines told of themselves, and last of all the cluster's own record. How
    long each was there stays."""
    stays.note(bucket)
    for prefix in (layout.NODES, layout.NETWORKS, layout.RANK0, layout.BOOT):
        bucket.delete([entry.key for entry in bucket.list(prefix)])
    bucket.delete([layout.CLUSTER])
