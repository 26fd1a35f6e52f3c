"""``gpuctl net``: the nodes' networks, and which can reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gpuctl.cli.render.terminal import ago, number, out, out_json, say, styled, table
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, wants_json
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.network.records import BlockedPort, Interface, NodeNetwork, blocked, read_networks
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.views.job_status import read_heartbeats
from gpuctl.cluster.views.status import read_cluster

_NODE_SPEC = Path("/etc/gpuctl/node.json")
"""On a machine that ``gpuctl up`` has made (see ``bootstrap.node_spec``)."""
_ALIVE = ("live", "leaving", "new")


def verb(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="NODE", help="Nodes to show (default: all live ones).")
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Show only this machine, as it is now; needs no cluster.")
    ] = False,
    output: Output = "text",
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Show the nodes' networks, and which can reach each other.

    Interfaces, gateways, neighbours, the variables that choose a network, and a table of who reaches whose ports, as
    the nodes have found it themselves: when they started, when others came or went, and once a minute.
    """
    as_json = wants_json(output)
    if here:
        if nodes:
            raise BadInput("--here shows this machine only", "leave out the names of nodes")
        _show([_this_machine()], [], as_json)
        return
    store = reach(cluster, bucket or _bucket_of_this_machine(cluster)).store
    living = {node.node for node in read_cluster(store, "").nodes if node.state in _ALIVE}
    records = [beat.record for beat in read_heartbeats(store) if beat.record.node in living]
    networks = read_networks(store, records)
    _show(_chosen(networks, records, nodes or []), records, as_json, matrix_of=networks)


def _chosen(networks: list[NodeNetwork], records: Sequence[NodeRecord], names: Sequence[str]) -> list[NodeNetwork]:
    told = {network.node: network for network in networks}
    living = sorted(record.node for record in records)
    if unknown := [name for name in names if name not in living]:
        raise BadInput(f"unknown node {unknown[0]!r}", f"there are: {', '.join(living) or 'none'}")
    for name in names or living:
        if name not in told:
            say(f"{name} has not reported its network yet")
    return [told[name] for name in names or living if name in told]


def _bucket_of_this_machine(cluster: str | None) -> str | None:
    """The bucket of the cluster that this machine is a node of, unless another cluster is named."""
    if cluster is not None or not _NODE_SPEC.exists():
        return None
    from gpuctl.bootstrap.network.inventory import spec_of

    spec = spec_of(_NODE_SPEC)
    return spec.bucket if spec else None


def _this_machine() -> NodeNetwork:
    from gpuctl.bootstrap.network import inventory  # psutil, and this machine's state, which a laptop has no use for

    spec = inventory.spec_of()
    if spec is None:
        return inventory.here(inventory.machine("ssh"))
    found = inventory.machine(spec.provider, fabric=spec.promise.fabric, address=spec.address)
    return inventory.here(found, spec.node, env=inventory.workers_env())


# -- how it looks ------------------------------------------------------------------------------------------------------


def _show(
    networks: Sequence[NodeNetwork],
    records: Sequence[NodeRecord],
    as_json: bool,
    matrix_of: Sequence[NodeNetwork] = (),
) -> None:
    shut = blocked(matrix_of)
    if as_json:
        out_json({"nodes": [_as_json(network) for network in networks], "blocked": msgspec.to_builtins(shut)})
        return
    for network in networks:
        for line in _lines(network):
            out(line)
        out()
    if len(records) > 1:
        for line in _matrix(matrix_of, sorted(record.node for record in records)):
            out(line)
    for one in shut:
        say(f"{one.source} cannot reach {one.target}'s {one.service} on port {one.port}: {one.why}{_cause(one)}")


def _lines(network: NodeNetwork) -> list[str]:
    ways = ", ".join(f"{gateway.address} by {gateway.interface}" for gateway in network.gateways) or "none"
    seen = f", {ago(network.at)}" if network.at else ""
    head = f"{styled(network.node, 'bold')}  {network.address} on {network.interface or 'no interface'}, gateway {ways}"
    header = ("INTERFACE", "STATE", "KIND", "MAC", "SPEED", "MTU", "ADDRESS", "SCOPE")
    lines = [f"{head}{seen}", *table(header, [row for one in network.interfaces for row in _rows(one)], give=[6])]
    if network.cards:
        cards = [[c.name, c.kind, "active" if c.active else "down", _gbps(c.gbps)] for c in network.cards]
        lines += table(("CARD", "KIND", "STATE", "SPEED"), cards)
    if network.neighbours:
        near = [
            [n.address, n.interface, n.mac or "-", "yes" if n.answers else "no", n.state.lower() or "-"]
            for n in network.neighbours
        ]
        lines += table(("NEIGHBOUR", "INTERFACE", "MAC", "ANSWERS", "STATE"), near)
    return lines + [f"{name}={value}" for name, value in network.env.items()]


def _rows(interface: Interface) -> list[list[str]]:
    """One line an address; the later ones have nothing else."""
    speed = _gbps(interface.speed_mbps / 1000 if interface.speed_mbps else None)
    kind = (interface.kind or "virtual") if interface.virtual else "card"
    up = "up" if interface.up else "down"
    rows = [[interface.name, up, kind, interface.mac or "-", speed, number(interface.mtu), "-", "-"]]
    for place, one in enumerate(interface.addresses):
        if place:
            rows.append([""] * 8)
        rows[-1][6:] = [f"{one.address}/{one.prefix}", one.scope]
    return rows


def _gbps(speed: float | None) -> str:
    return f"{speed:g} Gb/s" if speed else "-"


def _matrix(networks: Sequence[NodeNetwork], names: Sequence[str]) -> list[str]:
    """Each row is a node that asks. A cell: the slowest of its connections in ms, or what it could not reach."""
    told = {network.node: network for network in networks}
    rows = []
    for name in names:
        contacts = told[name].contacts if name in told else ()
        cells = []
        for other in names:
            made = [contact for contact in contacts if contact.node == other]
            if other == name:
                cells.append("-")
            elif shut := [contact.service for contact in made if not contact.ok]:
                cells.append(f"not {' '.join(shut)}")
            else:
                cells.append(f"{max(c.took_ms or 0.0 for c in made):.1f} ms" if made else "?")
        rows.append([name, *cells])
    return table(("FROM \\ TO", *names), rows)


def _cause(one: BlockedPort) -> str:
    if one.why == "timed out":
        return "; a firewall or a security group drops it, or the route is missing"
    if one.why == "refused":
        return "; nothing listens there any more: is its agent restarting?"
    return ""


def _as_json(network: NodeNetwork) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(network)
    for one, contact in zip(found["contacts"], network.contacts, strict=True):
        one["ok"] = contact.ok
    return found
