"""The ``ssh`` provider: a cluster of machines that somebody has already, such as those of a lab.

The same boot program as on rented machines runs there, started over ssh in place of cloud-init. They are not ours: they
never end by themselves, nothing of their own is changed, and ``down`` leaves them as they were, but for packages and
the images of ``train --image``, which stay.

::

    <bucket>/hosts/<node>.json     SshHost: which machines they are, for any user of the cluster

A machine that was dropped while nobody could reach it comes back after a reboot, with its node and its keys. So its
record stays until somebody has left it: every ``up`` and ``down`` tries again.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec.structs import replace

from gpuctl.bootstrap.node_spec import NodeSpec, Package
from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Bucket, open_bucket, probe
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records import ClusterSpec, SshHost, decode, encode
from gpuctl.cluster.refusals import shown
from gpuctl.stacks import known, package, ssh_config
from gpuctl.stacks.hosts import is_name, read_hosts
from gpuctl.stacks.known import KnownCluster
from gpuctl.stacks.provider import Say, UpRequest, agree_on_spec, forget_nodes
from gpuctl.stacks.ssh_machine import Machine, Refused, Target, parse_target
from gpuctl.stacks.ssh_watch import Watch

T = TypeVar("T")

_AT_ONCE = 32
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST")
"""Where packages come from is the same there as here."""


class SshProvider:
    """See ``provider.Provider``."""

    def up(self, request: UpRequest, say: Say) -> KnownCluster:
        targets = _targets(request)
        if not request.bucket:
            raise BadInput("machines of your own need a bucket that all of them reach", "such as --bucket s3://…")
        env = bucket_keys(request.bucket, os.environ, say)
        env |= {name: os.environ[name] for name in _PIP if os.environ.get(name)}
        bucket = open_bucket(request.bucket)
        probe(bucket)
        _agree_on_spec(bucket, request)
        cluster = KnownCluster(name=request.name, provider="ssh", bucket=request.bucket, created_at=time.time())
        before = known.get(request.name)
        if before is None or _place(before.bucket) == _place(cluster.bucket):
            known.remember(cluster)  # so that `down` finds it, whatever becomes of this
        made = package.publish(bucket)
        _drop_others(bucket, cluster, targets, say)
        with _logs() as logs:
            config = ssh_config.write(request.name, [])
            machines = {target: Machine(target.node, target.words, config, logs) for target in targets}
            troubles = _each(targets, lambda target: _begin(machines[target], target, bucket, cluster, made, env))
            begun = [machine for machine in machines.values() if machine.node not in troubles]
            troubles |= Watch(bucket, begun, say).until_ready()
        ssh_config.write(request.name, read_hosts(bucket))
        for trouble in troubles.values():
            say(f"error: {trouble}")
        if troubles:
            raise GpuctlError(
                f"{len(troubles)} of {len(targets)} machines did not become nodes: {', '.join(troubles)}",
                "mend them and run `gpuctl up` again, or leave them out of --hosts",
            )
        known.remember(cluster)
        return cluster

    def down(self, cluster: KnownCluster, say: Say, *, force: bool = False) -> list[str]:
        """``force``: machines that cannot be reached are forgotten, with all that is on them."""
        bucket = open_bucket(cluster.bucket)
        hosts = _hosts(bucket)
        left: list[str] = []
        with _logs() as logs:
            config = ssh_config.write(cluster.name, read_hosts(bucket))

            def leave(host: SshHost) -> None:
                if host.dropped:
                    say(_again(host))
                there = _leave(Machine(host.node, [f"{cluster.name}-{host.node}"], config, logs), cluster, say)
                if not there:
                    bucket.delete([layout.ssh_host(host.node)])
                left.extend(there)

            troubles = _each(hosts, leave)
        if troubles and force:
            for node, error in troubles.items():
                say(f"{node}: forgotten, with its node and its keys: {error.message}")
            bucket.delete([layout.ssh_host(node) for node in troubles])
        elif troubles:
            left += [f"gpuctl on {node}: {error.message}" for node, error in troubles.items()]
            say("a machine that is gone for good is forgotten by `gpuctl down --force`")
        if not left:
            forget_nodes(bucket)
            known.forget(cluster.name)
        return left

    def preempt(
        self,
        cluster: KnownCluster,  # noqa: ARG002
        node: str,
        notice_s: float,  # noqa: ARG002
        replace_after_s: float | None,  # noqa: ARG002
        say: Say,  # noqa: ARG002
    ) -> None:
        raise BadInput(f"{node} is a machine of your own, which nobody takes", "try `preempt` on --provider local")


def bucket_keys(url: str, env: Mapping[str, str], say: Say) -> dict[str, str]:
    """What a machine without an identity in a cloud needs to use the bucket, from ``env``. Raises ``BadInput`` if it
    would have no access."""
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    if parts.scheme == "s3" and "access_key_id" not in options:
        if not env.get("AWS_ACCESS_KEY_ID") or not env.get("AWS_SECRET_ACCESS_KEY"):
            raise BadInput(
                "the machines need credentials for the bucket, and the environment has none",
                'such as: eval "$(aws configure export-credentials --format env)"',
            )
        if env.get("AWS_SESSION_TOKEN"):
            say("these credentials expire; `gpuctl up` again gives the machines new ones")
        return {name: env[name] for name in _KEYS if env.get(name)}
    login = {"gs": "bearer_token", "az": "sas_key"}.get(parts.scheme)
    if login and login not in options:
        raise BadInput(
            f"machines of your own have no way to log in to {parts.scheme}://",
            "use s3:// (Google Cloud Storage speaks it too, with HMAC keys), or file:// on a shared file system",
        )
    return {}


# -- the machines ------------------------------------------------------------------------------------------------------


def _targets(request: UpRequest) -> list[Target]:
    if not request.hosts:
        raise BadInput("name the machines", "such as --hosts lab-1,lab-2")
    targets = [parse_target(text) for text in request.hosts]
    names = [target.node for target in targets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadInput(f"{twice[0]} is there twice in --hosts", "name each machine once")
    if request.nodes_max != len(targets):
        raise BadInput(f"{request.nodes_max} nodes of {len(targets)} machines", "leave out --nodes, or name as many")
    return targets


def _begin(
    machine: Machine, target: Target, bucket: Bucket, cluster: KnownCluster, made: Package, env: dict[str, str]
) -> None:
    facts = machine.look()
    if facts.troubles:
        raise Refused(f"{target.node} cannot be a node: {'; '.join(facts.troubles)}", "mend that there")
    if facts.cluster and (facts.cluster, _place(facts.bucket)) != (cluster.name, _place(cluster.bucket)):
        raise Refused(
            f"{target.node} is a node of another cluster, {facts.cluster!r} at {shown(facts.bucket)}",
            "take that down first, or leave it out",
        )
    bucket.put(layout.ssh_host(target.node), encode(machine.about(target, facts)))
    bucket.delete([layout.boot_report(target.node)])  # of an earlier boot
    spec = NodeSpec(
        cluster=cluster.name,
        provider="ssh",
        bucket=cluster.bucket,
        package=made,
        node=target.node,
        address=facts.address,
        idle_minutes=0.0,
        unhealthy_minutes=0.0,
        env=env,
    )
    machine.begin(spec)


def _leave(machine: Machine, cluster: KnownCluster, say: Say) -> list[str]:
    """Names what is left there. Raises ``Refused`` if it cannot be reached, or is a node of a namesake."""
    facts = machine.look()
    if facts.cluster == cluster.name and _place(facts.bucket) != _place(cluster.bucket):
        raise Refused(
            f"{machine.node} is a node of a cluster of the same name at {shown(facts.bucket)}", "take that down first"
        )
    if facts.cluster and facts.cluster != cluster.name:
        say(f"{machine.node}: is a node of another cluster now, {facts.cluster!r}, and stays it")
        return []
    left, packages = machine.undo()
    say(f"{machine.node}: no node any more" + (f"; packages that stay: {' '.join(packages)}" if packages else ""))
    return [f"{thing} on {machine.node}" for thing in left]


def _place(url: str) -> tuple[str, str, str]:
    """What a cluster's bucket is known by, however its URL is written: the options change with its keys."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc, unquote(parts.path).strip("/")


def _drop_others(bucket: Bucket, cluster: KnownCluster, targets: list[Target], say: Say) -> None:
    """Machines that an earlier ``up`` named and this one does not. Those that cannot be left now stay on record."""
    wanted = {target.node for target in targets}
    gone = [host for host in _hosts(bucket) if host.node not in wanted]
    if not gone:
        return
    with _logs() as logs:
        config = ssh_config.write(cluster.name, read_hosts(bucket))

        def drop(host: SshHost) -> None:
            if host.dropped:
                say(_again(host))
            bucket.put(layout.ssh_host(host.node), encode(replace(host, dropped=True)))
            left = _leave(Machine(host.node, [f"{cluster.name}-{host.node}"], config, logs), cluster, say)
            for thing in left:
                say(f"left: {thing}")
            if not left:
                bucket.delete([layout.ssh_host(host.node)])

        for node, error in _each(gone, drop).items():
            say(f"{node}: dropped, and gpuctl is still on it, until `up` or `down` reaches it: {error.message}")
    bucket.delete([key for host in gone for key in _told_by(host.node)])


def _again(host: SshHost) -> str:
    return f"{host.node}: was dropped before and not left; trying again"


def _told_by(node: str) -> tuple[str, ...]:
    return (layout.node(node), layout.network(node), layout.boot_report(node))


def _hosts(bucket: Bucket) -> list[SshHost]:
    entries = bucket.list(layout.HOSTS)
    found = bucket.get_many([entry.key for entry in entries])
    hosts = [decode(data, SshHost, e.key) for e, data in zip(entries, found, strict=True) if data is not None]
    return [host for host in hosts if is_name(host.node)]


def _each(things: Iterable[T], do: Callable[[T], None]) -> dict[str, GpuctlError]:
    """``do`` for all of them at the same time; returns what went wrong, by node."""
    troubles: dict[str, GpuctlError] = {}

    def tried(thing: T) -> None:
        try:
            do(thing)
        except Refused as error:
            troubles[getattr(thing, "node")] = error  # noqa: B009 - a Target or an SshHost

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(tried, things))
    return troubles


# -- the spec ----------------------------------------------------------------------------------------------------------


def _agree_on_spec(bucket: Bucket, request: UpRequest) -> None:
    """The cluster's record: a new one, or the one that is there, which may grow and shrink."""
    asked = ClusterSpec(
        name=request.name,
        provider="ssh",
        nodes_min=request.nodes_min,
        nodes_max=request.nodes_max,
        slots=request.slots,
        stall_minutes=request.stall_minutes,
        token=secrets.token_hex(16),
        created_at=time.time(),
    )
    there = agree_on_spec(bucket, asked, {what: attrgetter(what) for what in ("name", "provider", "slots")})
    if there is not asked:
        bucket.put(layout.CLUSTER, encode(replace(there, nodes_min=asked.nodes_min, nodes_max=asked.nodes_max)))


@contextmanager
def _logs() -> Iterator[Path]:
    """Where ssh says what it has to say."""
    with tempfile.TemporaryDirectory(prefix="gpuctl-ssh-") as folder:
        yield Path(folder)
