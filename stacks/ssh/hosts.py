"""The machines of a cluster as somebody sees them who wants to log in: named, in rank order, with what ssh needs.

All of it is in the bucket, which says what is put into ssh's configuration here. So what is not a plain name, address
or key is left out: whoever can write the bucket may run code on nodes, but not on the machine of whoever looks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeVar

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import BootReport, NodeRecord, SshHost
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.record_io import read_folder
from gpuctl.cluster.views.job_status import Heartbeat, read_heartbeats
from gpuctl.stacks.ssh import tunnels

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")
_JUMP = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:@,\[\]-]*[A-Za-z0-9\]])?")
_FILE = re.compile(r"[A-Za-z0-9_/~][A-Za-z0-9_/.+@=, -]*")
_KEY = re.compile(r"((?:ssh|ecdsa|sk)-[a-z0-9@.-]+) ([A-Za-z0-9+/]+=*)(?: .*)?")


def is_name(text: str) -> bool:
    """Whether ``text`` can name a node: nothing else may become a part of a path or of a setting."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and how its sshd is reached."""

    node: str
    index: int
    """In rank order: 0 is rank 0."""
    takes_part: bool
    """It has a heartbeat, rank 0 does not take it for lost, and it was not dropped."""
    address: str
    """What ssh connects to; empty where nobody knows one yet."""
    is_public: bool
    """``address`` can be reached from outside the cluster's network, as far as gpuctl knows."""
    user: str = ""
    port: int = 22
    jump: str = ""
    tunnel: tuple[str, ...] = ()
    """Command whose standard input and output are its sshd (see ``tunnels``), where nothing else leads to it."""
    identities: tuple[str, ...] = ()
    host_keys: tuple[str, ...] = ()


def read_hosts(store: Bucket, spec: ClusterSpec | None = None) -> list[Host]:
    """Hosts in rank order: rank 0, the members of the round that runs in theirs, other nodes by name, and then what is
    not a node yet, or not any more. ``spec``: the cluster's record, where the caller has read it already."""
    spec = spec or _spec(store)
    beats = read_heartbeats(store)
    lease = ledgers.lease(store).read()
    rank0 = lease.value.node if lease.value else ""
    leader = next((beat.record for beat in beats if beat.record.node == rank0), None)
    seats = _seats(store, leader)
    reports = {report.node: report for _, report in read_folder(store, layout.BOOT, BootReport)}
    given = {host.node: host for _, host in read_folder(store, layout.HOSTS, SshHost)}
    nodes = {beat.record.node: beat for beat in beats}
    names = sorted(
        (name for name in {*nodes, *reports, *given} if is_name(name)),
        key=lambda n: (n != rank0, n not in nodes, seats.get(n, len(seats)), len(n), n),
    )
    hosts = [
        _host(index, name, nodes.get(name), leader, reports.get(name), given.get(name))
        for index, name in enumerate(names)
    ]
    return [_tunnelled(host, spec, reports.get(host.node)) if spec else host for host in hosts]


def chosen(hosts: list[Host], name: str | None) -> Host:
    """The one called ``name``, or by its index; rank 0 if none is named. Raises ``BadInput`` naming those there are."""
    if not hosts:
        raise BadInput("the cluster has no nodes yet", "wait for them with `gpuctl status -w`")
    if name is None:
        return hosts[0]
    found = next((host for host in hosts if host.node == name), None)
    if found is None and re.fullmatch(r"\d+", name, re.ASCII) and int(name) < len(hosts):
        found = hosts[int(name)]
    if found is None:
        there = ", ".join(f"{host.index} {host.node}" for host in hosts[:20])
        raise BadInput(f"unknown node {name!r}", f"there are: {there}")
    return found


def _host(
    index: int,
    name: str,
    beat: Heartbeat | None,
    leader: NodeRecord | None,
    report: BootReport | None,
    given: SshHost | None,
) -> Host:
    takes_part = beat is not None and (leader is None or leader.view.get(name) != "lost")
    if given is not None:
        return Host(
            node=name,
            index=index,
            takes_part=takes_part and not given.dropped,
            address=_plain(_ADDRESS, given.host),
            is_public=True,
            user=_plain(_NAME, given.user),
            port=given.port,
            jump=_plain(_JUMP, given.jump),
            identities=tuple(file for file in given.identities if _FILE.fullmatch(file)),
            host_keys=_keys(given.host_keys),
        )
    public = _plain(_ADDRESS, report.public_address) if report else ""
    private = _plain(_ADDRESS, (report.address if report else "") or (beat.record.address if beat else ""))
    return Host(
        node=name,
        index=index,
        takes_part=takes_part,
        address=public or private,
        is_public=bool(public),
        user=_plain(_NAME, report.user) if report else "",
        host_keys=_keys(report.host_keys) if report else (),
    )


def _tunnelled(host: Host, spec: ClusterSpec, report: BootReport | None) -> Host:
    """The host with its tunnel, if it has no public address and its cloud has another."""
    if host.is_public:
        return host
    zone = report.zone if report else ""
    return replace(host, tunnel=tunnels.command(spec.provider, host.node, region=spec.region, zone=zone))


def _spec(store: Bucket) -> ClusterSpec | None:
    data = store.get(layout.CLUSTER)
    return decode(data, ClusterSpec, layout.CLUSTER) if data else None


def _seats(store: Bucket, leader: NodeRecord | None) -> dict[str, int]:
    """The positions of the members of the round that runs, by node."""
    for job in leader.rounds if leader else ():
        found = ledgers.rounds(store, job).read().value
        if found and found.members:
            return {member.node: seat for seat, member in enumerate(found.members)}
    return {}


def _plain(shape: re.Pattern[str], text: str) -> str:
    return text if shape.fullmatch(text) else ""


def _keys(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Kind and key, without the comment."""
    return tuple(f"{found[1]} {found[2]}" for line in lines if (found := _KEY.fullmatch(line.strip())))
