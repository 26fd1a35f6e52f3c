"""What a node's network looks like from the node: ``net/<node>.json``, written by its agent when it starts and whenever
the answer changes. So a laptop learns who can reach whom without reaching any of them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Literal

import msgspec

from gpuctl.cluster import layout
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.record_io import read_each

Scope = Literal["loopback", "link", "private", "public"]
CardKind = Literal["efa", "infiniband", "roce"]


class Address(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    prefix: int
    """Bits of the network's part."""
    scope: Scope


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    up: bool
    """Switched on, and with a carrier."""
    virtual: bool
    """Made by the kernel, as bridges, tunnels and the ends of containers are; no card."""
    kind: str = ""
    """Of a virtual one, as the kernel names it, such as ``veth``."""
    mac: str = ""
    mtu: int = 0
    speed_mbps: int | None = None
    """What the driver says; ``None`` where it does not, as on most clouds."""
    addresses: tuple[Address, ...] = ()


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """Where packets go that no other route takes."""

    address: str
    interface: str


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the kernel's neighbour table: a recent contact on the same network."""

    address: str
    interface: str
    answers: bool
    mac: str = ""
    state: str = ""
    """The kernel's word, such as ``REACHABLE``; empty where it does not tell."""


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device below ``/sys/class/infiniband``: a network card that takes data past the kernel."""

    name: str
    kind: CardKind
    active: bool
    gbps: float | None = None


class ConnectAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to connect to a port of another node."""

    node: str
    address: str
    port: int
    service: str
    """What listens there: ``agent``, ``checkpoints`` …"""
    took_ms: float | None = None
    """Until the connection stood; ``None``: it never did."""
    why: str = ""
    """Then: ``timed out`` (who drops packets says nothing), ``refused``, or what the system says."""

    @property
    def ok(self) -> bool:
        return self.took_ms is not None


class NodeNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A node's network as it reports it, ``net/<node>.json``."""

    node: str
    incarnation: str
    address: str
    """What the others know the node by."""
    interface: str = ""
    """The one that carries it, and so the training's traffic."""
    interfaces: tuple[Interface, ...] = ()
    gateways: tuple[Gateway, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    cards: tuple[RdmaDevice, ...] = ()
    contacts: tuple[ConnectAttempt, ...] = ()
    env: dict[str, str] = {}
    """Of the variables that the workers get, those that choose a network."""
    at: float = 0.0

    def essence(self) -> object:
        """All that is worth writing again for: not how long a connection took, nor whom the kernel spoke to last."""
        contacts = [(c.node, c.address, c.port, c.why) for c in self.contacts]
        still = msgspec.structs.replace(self, contacts=(), neighbours=(), at=0.0)
        return still, contacts


class BlockedPort(msgspec.Struct, frozen=True, kw_only=True):
    """One node cannot reach another one's port."""

    source: str
    target: str
    service: str
    port: int
    why: str


def scope_of(address: str) -> Scope:
    """The scope of an address: private, public, link-local, …

    >>> scope_of("10.1.2.3"), scope_of("52.95.110.1"), scope_of("fe80::1%eth0")
    ('private', 'public', 'link')
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return "loopback"
    if ip.is_link_local:
        return "link"
    return "public" if ip.is_global else "private"


def carrier(address: str, interfaces: Iterable[Interface]) -> Interface | None:
    """The interface that has ``address``, or whose network it is in (a local node's 127.0.0.3 is on ``lo``)."""
    found = list(interfaces)
    for interface in found:
        if any(one.address == address for one in interface.addresses):
            return interface
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None
    for interface in found:
        if any(ip in _network(one) for one in interface.addresses):
            return interface
    return None


def blocked(networks: Iterable[NodeNetwork]) -> list[BlockedPort]:
    """Which of them cannot reach which port of another."""
    return [
        BlockedPort(
            source=network.node, target=contact.node, service=contact.service, port=contact.port, why=contact.why
        )
        for network in networks
        for contact in network.contacts
        if not contact.ok
    ]


def read_networks(store: Bucket, records: Iterable[NodeRecord]) -> list[NodeNetwork]:
    """Networks by node, of those that have reported since they last started, with what they know of the others since
    theirs. What another version wrote is passed over."""
    lives = {record.node: record for record in records}
    ports = {(r.node, r.address, port) for r in lives.values() for port in (r.port, r.tier_port)}
    found = []
    for network in read_each(store, [layout.network(name) for name in sorted(lives)], NodeNetwork).values():
        if network.node in lives and network.incarnation == lives[network.node].incarnation:
            current = tuple(c for c in network.contacts if (c.node, c.address, c.port) in ports)
            found.append(msgspec.structs.replace(network, contacts=current))
    return found


def _network(one: Address) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(f"{one.address.partition('%')[0]}/{one.prefix}", strict=False)
