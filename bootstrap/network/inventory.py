"""What this machine's network is: interfaces, gateways, neighbours, fast cards, and the environment that follows.

``python -m gpuctl.bootstrap.network.inventory`` prints it as JSON, with ``--env`` only the environment: the boot
program puts that into the agent's ``identity.json``. It needs no torch, no root and no cluster.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.bootstrap.network.nccl_env import (
    CUDART,
    OFI_PLUGINS,
    TOPOLOGIES,
    NetworkHardware,
    Variable,
    fabric_env,
    traffic_interface,
)
from gpuctl.bootstrap.node_spec import NodeSpec, Package
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.network.devices import found_cards
from gpuctl.cluster.network.records import Address, Gateway, Interface, Neighbour, NodeNetwork, scope_of
from gpuctl.cluster.records.codec import decode

SPEC = Path("/etc/gpuctl/node.json")
IDENTITY = Path("/var/lib/gpuctl/node/identity.json")
_NONE_SO_FAST_MBPS = 1_000_000
"""A driver that does not know its speed may say 2^32 - 1 or 65,535."""
_ANSWERED = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT", "NOARP"}
_UP, _REJECT = 0x1, 0x200
"""Flags of the kernel's routes (linux/route.h, linux/ipv6_route.h)."""


def interfaces() -> tuple[Interface, ...]:
    """Network interfaces by name, including loopback."""
    stats, addresses, kinds = psutil.net_if_stats(), psutil.net_if_addrs(), _kinds()
    found = []
    for name in sorted(stats):
        link = [one for one in addresses.get(name, ()) if one.family == psutil.AF_LINK]
        speed = stats[name].speed
        found.append(
            Interface(
                name=name,
                up=stats[name].isup,
                virtual=name in kinds,
                kind=kinds.get(name, ""),
                mac=link[0].address.lower() if link else "",
                mtu=stats[name].mtu,
                speed_mbps=speed if 0 < speed < _NONE_SO_FAST_MBPS and speed != 0xFFFF else None,
                addresses=tuple(
                    _address(one.address, one.netmask)
                    for one in addresses.get(name, ())
                    if one.family in (socket.AF_INET, socket.AF_INET6)
                ),
            )
        )
    return tuple(found)


def gateways(proc: Path = Path("/proc/net")) -> tuple[Gateway, ...]:
    """The one that is used first, first; IPv4 before IPv6. Empty where the system does not tell."""
    found = sorted([*_default_routes(_lines(proc / "route")), *_default_routes6(_lines(proc / "ipv6_route"))])
    return tuple(Gateway(address=address, interface=name) for _, _, address, name in found)


def neighbours(proc: Path = Path("/proc/net")) -> tuple[Neighbour, ...]:
    """The kernel's table, as ``ip`` gives it; without ``ip`` that of IPv4, which knows no states."""
    listed = _ip("neigh")
    if listed is None:
        return tuple(_of_arp(line.split()) for line in _lines(proc / "arp")[1:])
    return tuple(
        Neighbour(
            address=one["dst"],
            interface=one.get("dev", ""),
            answers=bool(_ANSWERED & set(one.get("state", ()))),
            mac=one.get("lladdr", ""),
            state=" ".join(one.get("state", ())),
        )
        for one in listed
        if not ipaddress.ip_address(one["dst"]).is_multicast
    )


def machine(provider: str, machine_type: str = "", fabric: str = "", address: str = "") -> NetworkHardware:
    """This machine's network hardware, for ``fabric_env``."""
    candidates = {*OFI_PLUGINS, CUDART, *TOPOLOGIES.values()}
    return NetworkHardware(
        provider=provider,
        type=machine_type,
        fabric=fabric,
        address=address,
        interfaces=interfaces(),
        gateways=gateways(),
        cards=found_cards(),
        files=frozenset(path for path in candidates if Path(path).exists()),
        library_path=os.environ.get("LD_LIBRARY_PATH", ""),
    )


def here(of: NetworkHardware, node: str = "", incarnation: str = "", env: dict[str, str] | None = None) -> NodeNetwork:
    """This machine's network, as the bucket would have it, with nobody asked yet. ``env``: what the workers get, if
    that is known; else what they should."""
    interface = traffic_interface(of.address, of.interfaces, of.gateways)
    address = of.address or (interface.addresses[0].address if interface and interface.addresses else "")
    return NodeNetwork(
        node=node or socket.gethostname(),
        incarnation=incarnation,
        address=address,
        interface=interface.name if interface else "",
        interfaces=of.interfaces,
        gateways=of.gateways,
        neighbours=neighbours(),
        cards=of.cards,
        env=env if env is not None else as_env(fabric_env(of)),
    )


def as_env(variables: Sequence[Variable]) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables}


def spec_of(path: Path = SPEC) -> NodeSpec | None:
    """What this machine was told when it first booted; ``None`` on one that gpuctl did not make."""
    try:
        return decode(path.read_bytes(), NodeSpec, str(path))
    except OSError:
        return None


def workers_env(path: Path = IDENTITY) -> dict[str, str] | None:
    """What this node's agent was given for its workers; ``None`` where there is no agent, or who asks may not read."""
    try:
        return chosen(decode(path.read_bytes(), NodeIdentity, str(path)).env)
    except OSError:
        return None


def chosen(env: Mapping[str, str]) -> dict[str, str]:
    """Those variables that choose a network."""
    return {name: env[name] for name in sorted(env) if name.startswith(("NCCL_", "GLOO_", "FI_", "LD_LIBRARY_PATH"))}


# -- what the kernel says ----------------------------------------------------------------------------------------------


def _ip(*arguments: str) -> list[dict[str, Any]] | None:
    """``ip -j …``; ``None`` where there is no such program, or one that is too old."""
    try:
        done = subprocess.run(["ip", "-j", *arguments], capture_output=True, text=True, timeout=10, check=True)
        listed: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return listed


def _kinds() -> dict[str, str]:
    """Virtual interfaces and what they are. ``/sys`` may be another network namespace's, so ``ip`` is asked first."""
    listed = _ip("-d", "link")
    if listed is not None:
        kinds = {one["ifname"]: one.get("linkinfo", {}).get("info_kind", "") for one in listed}
        loops = {one["ifname"]: "loopback" for one in listed if one.get("link_type") == "loopback"}
        return {name: kind for name, kind in kinds.items() if kind} | loops
    devices = Path("/sys/class/net").glob("*")
    return {device.name: "virtual" for device in devices if "/devices/virtual/" in str(device.resolve())}


def _address(address: str, netmask: str | None) -> Address:
    bits = 128 if ":" in address else 32
    mask = int(ipaddress.ip_address(netmask)) if netmask else (1 << bits) - 1
    return Address(address=address.partition("%")[0], prefix=mask.bit_count(), scope=scope_of(address))


_Route = tuple[int, int, str, str]
"""(version, metric, gateway, interface): in the order of preference."""


def _default_routes(lines: Sequence[str]) -> list[_Route]:
    """The default routes in ``/proc/net/route``: numbers are hexadecimal, in the machine's own byte order."""
    found = []
    for line in lines[1:]:
        name, target, gateway, flags, _, _, metric, mask = line.split()[:8]
        if int(target, 16) == int(mask, 16) == 0 and int(flags, 16) & _UP and not int(flags, 16) & _REJECT:
            address = ipaddress.ip_address(int(gateway, 16).to_bytes(4, sys.byteorder))
            found.append((4, int(metric), str(address), name))
    return found


def _default_routes6(lines: Sequence[str]) -> list[_Route]:
    """The default routes in ``/proc/net/ipv6_route``. The kernel's own route to nowhere is among them, on ``lo``."""
    found = []
    for line in lines:
        target, bits, _, _, gateway, metric, _, _, flags, name = line.split()
        if int(target, 16) == int(bits, 16) == 0 and int(flags, 16) & _UP and not int(flags, 16) & _REJECT:
            address = ipaddress.ip_address(bytes.fromhex(gateway))
            found.append((6, int(metric, 16), str(address), name))
    return found


def _of_arp(fields: Sequence[str]) -> Neighbour:
    address, _, flags, mac, _, name = fields
    complete = int(flags, 16) & 0x2 != 0
    return Neighbour(address=address, interface=name, answers=complete, mac=mac if complete else "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# -- the command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gpuctl.bootstrap.network.inventory", description=__doc__)
    parser.add_argument("--env", action="store_true", help="print only the workers' variables")
    parser.add_argument("--why", action="store_true", help="with --env: a list of variables, each with its reason")
    parser.add_argument("--spec", type=Path, default=SPEC, help="what the machine was told (default: %(default)s)")
    parser.add_argument("--provider", help="in place of the spec's")
    parser.add_argument("--type", help="in place of the spec's: the cloud's name of the instance type")
    parser.add_argument("--fabric", help="in place of the spec's")
    parser.add_argument("--address", help="in place of the spec's; what the others know this node by")
    options = parser.parse_args(arguments)
    spec = spec_of(options.spec) or _nobody()
    found = machine(
        options.provider if options.provider is not None else spec.provider,
        options.type or spec.type,
        options.fabric if options.fabric is not None else spec.promise.fabric,
        options.address if options.address is not None else spec.address,
    )
    variables = fabric_env(found)
    if options.env:
        said: Any = [_shown(one) for one in variables] if options.why else as_env(variables)
    else:
        said = here(found, node=spec.node)
    print(msgspec.json.format(msgspec.json.encode(said), indent=2).decode())


def _shown(variable: Variable) -> dict[str, str]:
    return {"name": variable.name, "value": variable.value, "why": variable.why}


def _nobody() -> NodeSpec:
    """A machine that gpuctl did not make: it is what it has."""
    package = Package(wheel="", sha256="", constraints="", constraints_sha256="")
    return NodeSpec(cluster="", provider="ssh", bucket="", package=package)


if __name__ == "__main__":
    try:
        main()
    except GpuctlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
