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

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

from msgspec.structs import replace

from gpuctl.bootstrap.node_spec import AGENT_STOP_S, NodeSpec, Package
from gpuctl.cluster import layout
from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import SshHost
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.cluster.views.holders import read_record
from gpuctl.stacks.providers import node_package
from gpuctl.stacks.providers.interface import Say, UpRequest, UsesMachines
from gpuctl.stacks.providers.ownership import bucket_of, forget_nodes, place, settle
from gpuctl.stacks.providers.ssh_machine import MachineRefused, SshMachine
from gpuctl.stacks.providers.ssh_progress import SetupProgress
from gpuctl.stacks.ssh import config as ssh_config
from gpuctl.stacks.ssh.hosts import is_name, read_hosts
from gpuctl.stacks.ssh.target import SshTarget, parse_target
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster

T = TypeVar("T")

_AT_ONCE = 32
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST")
"""Where packages come from is the same there as here."""


class SshProvider(UsesMachines):
    """Nodes on the user's own machines, over SSH."""

    def up(self, request: UpRequest) -> KnownCluster:
        say = self._dialog.say
        before = clusters.get(request.name)
        request = dataclasses.replace(request, hosts=request.hosts or (before.hosts if before else ()))
        targets = _targets(request)
        url = bucket_of(request)
        if not url:
            raise BadInput("your own machines need a bucket that all of them can reach", "for example --bucket s3://…")
        ssh_config.program()
        env = bucket_keys(url, os.environ, say)
        env |= {name: os.environ[name] for name in _PIP if os.environ.get(name)}
        bucket = open_bucket(url)
        probe(bucket)
        settle(bucket, _sized(request, bucket), _new_spec(request), say)
        cluster = clusters.find(request.name)
        made = node_package.publish(bucket)
        _drop_others(bucket, cluster, targets, say)
        with _logs() as logs:
            config = ssh_config.write(request.name, [])
            machines = {target: SshMachine(target.node, target.words, config, logs) for target in targets}
            troubles = _each(targets, lambda target: _begin(machines[target], target, bucket, cluster, made, env))
            begun = [machine for machine in machines.values() if machine.node not in troubles]
            troubles |= SetupProgress(bucket, begun, say).until_ready()
        ssh_config.write(request.name, read_hosts(bucket))
        for trouble in troubles.values():
            say(f"error: {trouble}")
        if troubles:
            raise GpuctlError(
                f"{len(troubles)} of {len(targets)} machines did not become nodes: {', '.join(troubles)}",
                "fix them and run `gpuctl up` again, or leave them out of --hosts",
            )
        return cluster

    def down(self, cluster: KnownCluster, *, force: bool = False) -> list[str]:
        """``force``: machines that cannot be reached are forgotten, with all that is on them."""
        say = self._dialog.say
        ssh_config.program()
        bucket = open_bucket(cluster.bucket)
        hosts = _hosts(bucket)
        left: list[str] = []
        with _logs() as logs:
            config = ssh_config.write(cluster.name, read_hosts(bucket))

            def leave(host: SshHost) -> None:
                if host.dropped:
                    say(_again(host))
                there = _leave(SshMachine(host.node, [f"{cluster.name}-{host.node}"], config, logs), cluster, say)
                if not there:
                    bucket.delete([layout.ssh_host(host.node)])
                left.extend(there)

            troubles = _each(hosts, leave)
        if troubles and force:
            for node, error in troubles.items():
                say(f"{node}: removed from the records, though gpuctl and keys are still on it: {error.message}")
            bucket.delete([layout.ssh_host(node) for node in troubles])
        elif troubles:
            left += [f"gpuctl on {node}: {error.message}" for node, error in troubles.items()]
            say("for a machine that is gone for good: `gpuctl down --force`")
        if not left:
            forget_nodes(bucket, of=cluster.id)
            clusters.forget(cluster.name)
        return left


def bucket_keys(url: str, env: Mapping[str, str], say: Say) -> dict[str, str]:
    """The variables from ``env`` by which a machine without an identity in a cloud can use the bucket. Raises
    ``BadInput`` if it would have no access."""
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
            f"your own machines have no credentials for {parts.scheme}://",
            "use s3:// (Google Cloud Storage speaks it too, with HMAC keys), or file:// on a shared file system",
        )
    return {}


# -- the machines ------------------------------------------------------------------------------------------------------


def _targets(request: UpRequest) -> list[SshTarget]:
    if not request.hosts:
        raise BadInput("no machines given", "for example --hosts lab-1,lab-2")
    targets = [parse_target(text) for text in request.hosts]
    names = [target.node for target in targets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadInput(f"{twice[0]} appears twice in --hosts", "name each machine once")
    if request.nodes_max not in (None, len(targets)):
        raise BadInput(
            f"{request.nodes_max} nodes on {len(targets)} machines", "remove --nodes, or give as many machines"
        )
    return targets


def _begin(
    machine: SshMachine, target: SshTarget, bucket: Bucket, cluster: KnownCluster, made: Package, env: dict[str, str]
) -> None:
    facts = machine.look()
    if facts.troubles:
        raise MachineRefused(f"{target.node} cannot be a node: {'; '.join(facts.troubles)}", "fix that on the machine")
    if facts.cluster and (facts.cluster, place(facts.bucket)) != (cluster.name, place(cluster.bucket)):
        raise MachineRefused(
            f"{target.node} is a node of another cluster, {facts.cluster!r} at {shown(facts.bucket)}",
            "remove that cluster first, or leave the machine out",
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
        shutdown_s=AGENT_STOP_S,
        env=env,
    )
    machine.begin(spec)


def _leave(machine: SshMachine, cluster: KnownCluster, say: Say) -> list[str]:
    """Names what is left there. Raises ``MachineRefused`` if it cannot be reached, or is a node of a namesake."""
    facts = machine.look()
    if facts.cluster == cluster.name and place(facts.bucket) != place(cluster.bucket):
        raise MachineRefused(
            f"{machine.node} is a node of a cluster of the same name at {shown(facts.bucket)}", "take that down first"
        )
    if facts.cluster and facts.cluster != cluster.name:
        say(f"{machine.node}: now a node of another cluster, {facts.cluster!r}; left as it is")
        return []
    left, packages = machine.undo()
    say(f"{machine.node}: no longer a node" + (f"; packages that stay: {' '.join(packages)}" if packages else ""))
    return [f"{thing} on {machine.node}" for thing in left]


def _drop_others(bucket: Bucket, cluster: KnownCluster, targets: list[SshTarget], say: Say) -> None:
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
            left = _leave(SshMachine(host.node, [f"{cluster.name}-{host.node}"], config, logs), cluster, say)
            for thing in left:
                say(f"left: {thing}")
            if not left:
                bucket.delete([layout.ssh_host(host.node)])

        for node, error in _each(gone, drop).items():
            still = "removed from the cluster, but gpuctl still runs there until `up` or `down` reaches it"
            say(f"{node}: {still}: {error.message}")
    bucket.delete([key for host in gone for key in _told_by(host.node)])


def _again(host: SshHost) -> str:
    return f"{host.node}: removed earlier but not cleaned up; trying again"


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
        except MachineRefused as error:
            troubles[getattr(thing, "node")] = error  # noqa: B009 - a Target or an SshHost

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(tried, things))
    return troubles


# -- the spec ----------------------------------------------------------------------------------------------------------


def _new_spec(request: UpRequest) -> ClusterSpec:
    """The spec of a new cluster, with defaults."""
    many = len(request.hosts)
    return ClusterSpec(name=request.name, provider="ssh", nodes_min=many, nodes_max=many)


def _sized(request: UpRequest, bucket: Bucket) -> UpRequest:
    """The request with as many nodes as there are machines, where nobody said how many and it is no more as many as
    before."""
    there, many = read_record(bucket), len(request.hosts)
    if request.nodes_max is not None or there is None or there.nodes_max == many:
        return request
    return dataclasses.replace(request, nodes_min=many, nodes_max=many)


@contextmanager
def _logs() -> Iterator[Path]:
    """A temporary folder for what ssh has to say."""
    with tempfile.TemporaryDirectory(prefix="gpuctl-ssh-") as folder:
        yield Path(folder)
