"""``gpuctl verify``: tests the nodes' devices and the network between them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from gpuctl.cli.render.terminal import count, out, out_json, size, styled, table
from gpuctl.cli.session.open_cluster import reach_with
from gpuctl.cli.session.verify_job import judge, measure
from gpuctl.cli.settings.options import Cluster, Output, parse_flag, seconds, text_option, wants_json
from gpuctl.cli.settings.resolve import load, parse_nodes
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.network.verification import AllReduceResult, Verification, slowest
from gpuctl.cluster.records.clusters import Promised


def verb(
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="Nodes to use (default: all).")
    ] = None,
    burn_in: Annotated[
        str | None,
        text_option("--burn-in", metavar="SECONDS", about="Seconds of matrix products on each GPU (default: 10)."),
    ] = None,
    output: Output = "text",
    cluster: Cluster = None,
) -> None:
    """Test the nodes' devices and the network between them.

    A job like any other: it waits its turn. Each device multiplies and each memory is read back; then all-reduces
    between each two nodes and among all of them, beside what the machines' network is sold as. Exits 1 if a device is
    broken, a port is shut, a node or a pair is slow, or NCCL has fallen back to TCP.
    """
    as_json = wants_json(output)
    settings = load({"cluster": cluster})
    wanted = parse_flag("--nodes", nodes, parse_nodes)
    burn_in_s = parse_flag("--burn-in", burn_in, seconds)
    store = reach_with(settings).store
    spec = queue.cluster_spec(store)
    queue.check_nodes(spec, wanted)
    found = measure(store, spec, settings, wanted, burn_in_s)
    if as_json:
        out_json(_as_json(found, spec.promised))
    else:
        for line in lines(found, spec.promised):
            out(line)
    judge(found)


# -- how it looks ------------------------------------------------------------------------------------------------------


def lines(found: Verification, promised: Promised | None) -> list[str]:
    """The lines that ``verify`` prints."""
    sold = f"; the vendor advertises {promised.network_gbps:g} Gb/s" if promised else ""
    said = [f"{styled(found.job, 'bold')}  {count(len(found.nodes), 'node')}, {found.backend}{sold}", ""]
    said += table(("NODE", "RANK", "DEVICE", "TFLOP/S", "PRODUCTS", "MEMORY", "WRONG"), _devices(found), give=[2])
    if any(one.transport.network or one.efa or one.infiniband for one in found.fabrics):
        rows = [
            [
                one.node,
                one.transport.network or "-",
                "yes" if one.transport.gdr else "no",
                str(one.efa),
                str(one.infiniband),
            ]
            for one in found.fabrics
        ]
        said += ["", *table(("NODE", "NETWORK", "GPU DIRECT", "EFA", "INFINIBAND"), rows)]
    header = ("BETWEEN", "WORKERS", "SIZE", "TIME", "ALGORITHM GB/S", "BUS GB/S", "OF PROMISED")
    if measured := [*found.pairs, *found.everyone]:
        said += ["", *table(header, [_measured(one, found, promised) for one in measured])]
    if (worst := slowest(found.pairs)) and len(found.pairs) > 1:
        at_once = ", measured several at once" if found.together else ""
        said += [f"the slowest pair is {' and '.join(worst.nodes)}: {worst.bus_gbs:.3g} GB/s{at_once}"]
    return said


def _devices(found: Verification) -> list[list[str]]:
    return [
        [
            one.node,
            str(one.rank),
            one.device,
            f"{one.tflops:.3g}",
            str(one.products),
            size(one.memory_bytes),
            one.trouble or (f"{one.wrong_products + one.wrong_words}"),
        ]
        for one in found.devices
    ]


def _measured(one: AllReduceResult, found: Verification, promised: Promised | None) -> list[str]:
    among = " ".join(one.nodes) if len(one.nodes) <= 2 else f"all {len(found.nodes)}"
    share = f"{one.bus_gbs * 8 / promised.network_gbps:.0%}" if promised and len(one.nodes) > 1 else "-"
    if not one.seconds:
        return [among, str(one.ranks), size(one.bytes), one.trouble[:60], "-", "-", "-"]
    took = f"{one.seconds * 1000:.3g} ms"
    return [among, str(one.ranks), size(one.bytes), took, f"{one.algorithm_gbs:.3g}", f"{one.bus_gbs:.3g}", share]


def _as_json(found: Verification, promised: Promised | None) -> dict[str, Any]:
    """The record in the bucket as JSON, with the bandwidths computed from it."""
    said: dict[str, Any] = msgspec.to_builtins(found)
    for name, measured in (("pairs", found.pairs), ("everyone", found.everyone)):
        for told, one in zip(said[name], measured, strict=True):
            told |= {"algorithm_gbs": one.algorithm_gbs, "bus_gbs": one.bus_gbs}
    worst = slowest(found.pairs)
    said["slowest"] = list(worst.nodes) if worst else None
    said["promised"] = msgspec.to_builtins(promised)
    return said
