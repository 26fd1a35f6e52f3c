"""``gpuctl verify``"""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gpuctl.cli.access import reach_with
from gpuctl.cli.follow import Follower, Found, Printer, tell_end
from gpuctl.cli.options import Cluster, Output, parse_flag, seconds, text_option, wants_json
from gpuctl.cli.settings import load, parse_nodes
from gpuctl.cli.terminal import count, out, out_json, say, size, styled, table
from gpuctl.cli.train import send_folder
from gpuctl.cli.verbs import Interrupted
from gpuctl.cluster import jobs, layout
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records import JobSpec, Promised, decode
from gpuctl.cluster.verification import Measured, Verification, slowest

_SCRIPT = "verify.py"
_BODY = "from gpuctl.trainers.verify import main\n\nmain()\n"
_NCCL = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV"))
"""Else it does not say that it has fallen back to TCP."""


def verb(
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="Fewer than the cluster has.")
    ] = None,
    burn_in: Annotated[
        str | None, text_option("--burn-in", metavar="SECONDS", about="That each GPU multiplies (default: 10).")
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
    spec = jobs.cluster_spec(store)
    jobs.check_nodes(spec, wanted)
    request = jobs.Request(
        script=_SCRIPT,
        args=() if burn_in_s is None else ("--burn-in", str(burn_in_s)),
        env=(*settings.env.items(), *_NCCL),
        code=_send(store),
        nodes=wanted,
        nproc=settings.nproc,
        submitted_by=getpass.getuser(),
    )
    found = _found(store, jobs.submit(store, spec, request))
    if as_json:
        out_json(_as_json(found, spec.promised))
    else:
        for line in lines(found, spec.promised):
            out(line)
    for one in found.findings:
        say(f"{one.severity}: {one.what}" + (f" ({one.cause})" if one.cause else ""))
    if failures := [one for one in found.findings if one.severity == "fail"]:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise GpuctlError(f"{failures[0].what}{more}", failures[0].cause)


def _send(store: Bucket) -> str:
    with tempfile.TemporaryDirectory(prefix="gpuctl-") as folder:
        (Path(folder) / _SCRIPT).write_text(_BODY)
        return send_folder(store, Path(folder), _SCRIPT)


def _found(store: Bucket, job: JobSpec) -> Verification:
    """Follow the job to its end. Raises ``JobFailed`` where it has told nothing."""
    try:
        outcome = Follower(store, job, _Quiet()).to_the_end()
    except KeyboardInterrupt as error:
        jobs.ask_to_cancel(store, job.job)
        raise Interrupted(f"{job.job} is being cancelled") from error
    last = jobs.rounds(store, job.job).read().value
    key = layout.verification(job.job, last.number if last else 0)
    data = store.get(key)
    if data is None:
        tell_end(job, outcome)
        raise GpuctlError(f"job {job.job} ended and has told nothing", f"all it printed: gpuctl logs {job.job}")
    return decode(data, Verification, key)


@dataclass(slots=True)
class _Quiet(Printer):
    """What rank 0 prints is progress here."""

    def show(self, found: Iterable[Found]) -> None:
        for _, _, line in found:
            if line.get("rank") == 0 and line.get("stream") == "stdout":
                say(str(line.get("text", "")).rstrip())


# -- how it looks ------------------------------------------------------------------------------------------------------


def lines(found: Verification, promised: Promised | None) -> list[str]:
    """What ``verify`` prints."""
    sold = f"; the machines are sold with {promised.network_gbps:g} Gb/s" if promised else ""
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


def _measured(one: Measured, found: Verification, promised: Promised | None) -> list[str]:
    among = " ".join(one.nodes) if len(one.nodes) <= 2 else f"all {len(found.nodes)}"
    share = f"{one.bus_gbs * 8 / promised.network_gbps:.0%}" if promised and len(one.nodes) > 1 else "-"
    if not one.seconds:
        return [among, str(one.ranks), size(one.bytes), one.trouble[:60], "-", "-", "-"]
    took = f"{one.seconds * 1000:.3g} ms"
    return [among, str(one.ranks), size(one.bytes), took, f"{one.algorithm_gbs:.3g}", f"{one.bus_gbs:.3g}", share]


def _as_json(found: Verification, promised: Promised | None) -> dict[str, Any]:
    """As it is in the bucket, with the bandwidths that follow."""
    said: dict[str, Any] = msgspec.to_builtins(found)
    for name, measured in (("pairs", found.pairs), ("everyone", found.everyone)):
        for told, one in zip(said[name], measured, strict=True):
            told |= {"algorithm_gbs": one.algorithm_gbs, "bus_gbs": one.bus_gbs}
    worst = slowest(found.pairs)
    said["slowest"] = list(worst.nodes) if worst else None
    said["promised"] = msgspec.to_builtins(promised)
    return said
