"""By which address the other nodes reach this one, and by which interface it reaches rank 0."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from gpuctl.bootstrap.network import inventory
from gpuctl.bootstrap.network.nccl_env import traffic_interface
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.network.addresses import family_of
from gpuctl.cluster.network.records import Interface, carrier

_LOOPBACK = "127.0.0.1"


def own_address(address: str | None = None, interface: str | None = None) -> str:
    """The address that this node tells the others: the one given, that of the ``interface`` given, or that of the
    interface which leads out. Loopback where there is no network: then all nodes are on this machine.

    Raises ``BadInput`` for an address or an interface that this machine does not have.
    """
    there = inventory.interfaces()
    if address is not None:
        try:
            address = str(ipaddress.ip_address(address.strip("[]")))
        except ValueError as error:
            raise BadInput(f"{address!r} is not an IP address", f"this machine has {shown(there)}") from error
        if not carrier(address, there) and not ipaddress.ip_address(address).is_loopback:
            raise BadInput(f"this machine does not have the address {address}", f"it has {shown(there)}")
        return address
    if interface is not None:
        found = next((one for one in there if one.name == interface), None)
        if found is None:
            raise BadInput(f"unknown interface {interface!r}", f"this machine has {shown(there)}")
        if not found.addresses:
            raise BadInput(f"interface {interface} has no address", f"this machine has {shown(there)}")
    else:
        found = traffic_interface("", there, inventory.gateways())
    addresses = [one.address for one in found.addresses if one.scope != "link"] if found else []
    return addresses[0] if addresses else _LOOPBACK


def shown(interfaces: Sequence[Interface]) -> str:
    """The interfaces with their addresses, for people."""
    found = [f"{one.name} ({one.addresses[0].address})" for one in interfaces if one.addresses]
    return ", ".join(found) or "none"


def towards(master_address: str, own: str) -> tuple[str, str]:
    """The address and the name of the interface by which this machine reaches ``master_address``; on rank 0 itself,
    those that it is reached by. The name is empty where it cannot be told."""
    local = own
    if master_address != own:
        with contextlib.suppress(OSError), socket.socket(family_of(master_address), socket.SOCK_DGRAM) as route:
            route.connect((master_address, 9))  # sends nothing: the kernel only looks for the way
            local = route.getsockname()[0]
    found = carrier(local, inventory.interfaces())
    if found is None and ipaddress.ip_address(local).is_loopback:
        return local, "lo"
    return local, found.name if found else ""
