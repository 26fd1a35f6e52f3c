"""The job behind ``gpuctl verify``: sent, followed to its end, and judged."""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuctl.cli.render.job.follow import Follower, tell_end
from gpuctl.cli.render.job.log_lines import Found, Printer
from gpuctl.cli.render.terminal import say
from gpuctl.cli.session.job_upload import send_folder
from gpuctl.cli.settings.resolve import Settings
from gpuctl.cli.signals import Interrupted
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.network.verification import Verification
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.stacks.state.clusters import command
from gpuctl.trainers.diagnostics.net_plugin import FABRICS

_SCRIPT = "verify.py"
_BODY = "from gpuctl.trainers.diagnostics.verify_job import main\n\nmain()\n"
_NCCL = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV"))
"""Else it does not say that it has fallen back to TCP."""
_SHORT_S = 2.0
_LIMIT_MINUTES, _NODES_A_MINUTE = 10, 6
"""For the short one that nobody has asked for: it takes a minute, and more nodes have more pairs."""


def verify_new(store: Bucket, settings: Settings, limit_s: float | None = None) -> None:
    """A short one of a cluster that has had no job since it was made and is sold with EFA or InfiniBand between its
    nodes: what makes NCCL fall back to TCP is the same for every job to come. Raises ``GpuctlError``, also where it
    takes longer than ``limit_s`` (``None``: what is enough for so many nodes): it is cancelled then."""
    spec = queue.cluster_spec(store)
    fast = spec.promised is not None and spec.promised.fabric in FABRICS
    if not fast or spec.nodes_max < 2 or _had_a_job(store, spec):
        return
    if limit_s is None:
        limit_s = 60.0 * (_LIMIT_MINUTES + spec.nodes_max // _NODES_A_MINUTE)
    at_most = f"{limit_s / 60:.3g} minutes at most"
    say(f"testing the devices and the network between the nodes ({at_most}; Ctrl-C skips it)")
    judge(measure(store, spec, settings, None, _SHORT_S, limit_s))
    say("passed: NCCL uses the fabric; `gpuctl verify` shows details")


def _had_a_job(store: Bucket, spec: ClusterSpec) -> bool:
    """Jobs of a cluster of that name that is gone, whose bucket this one has, say nothing about these machines."""
    return queue.newest(store) is not None and queue.find(store, None).submitted_at >= spec.created_at


def measure(
    store: Bucket,
    spec: ClusterSpec,
    settings: Settings,
    nodes: tuple[int, int] | None,
    burn_in_s: float | None,
    limit_s: float | None = None,
) -> Verification:
    """Run the job that tests the nodes, and return its findings.

    Args:
        store: the cluster's bucket.
        spec: the cluster's record.
        settings: give the workers' variables and the processes per node.
        nodes: the fewest and the most to use; ``None``: all.
        burn_in_s: seconds of matrix products on each GPU; ``None``: the job's default.
        limit_s: seconds that the job may take; ``None``: any number.

    Raises ``JobFailed`` where it has told nothing, ``GpuctlError`` where it takes longer than ``limit_s``: it is
    cancelled then.
    """
    request = queue.JobRequest(
        script=_SCRIPT,
        args=() if burn_in_s is None else ("--burn-in", str(burn_in_s)),
        env=(*settings.env.items(), *_NCCL),
        code=_send(store),
        nodes=nodes,
        nproc=settings.nproc,
        allow_tcp=True,  # that it is so is what it finds out
        submitted_by=getpass.getuser(),
    )
    job = queue.submit(store, spec, request)
    try:
        return _found(store, job, limit_s)
    except TimeoutError as error:
        assert limit_s is not None
        queue.ask_to_cancel(store, job.job, now=True)
        name = settings.cluster
        raise GpuctlError(
            f"the network test timed out after {limit_s / 60:.3g} minutes; {job.job} is being cancelled",
            f"the cluster is up and takes jobs; {command(f'logs {job.job}', name)} tells how far it came,"
            f" {command('verify', name)} tests again without a limit, {command('down', name)} ends the cluster",
        ) from error


def judge(found: Verification) -> None:
    """Tell the findings. Raises ``GpuctlError`` if one of them is a failure."""
    for one in found.findings:
        say(f"{one.severity}: {one.what}" + (f" ({one.cause})" if one.cause else ""))
    if failures := [one for one in found.findings if one.severity == "fail"]:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise GpuctlError(f"{failures[0].what}{more}", failures[0].cause)


def _send(store: Bucket) -> str:
    with tempfile.TemporaryDirectory(prefix="gpuctl-") as folder:
        (Path(folder) / _SCRIPT).write_text(_BODY)
        return send_folder(store, Path(folder), _SCRIPT)


def _found(store: Bucket, job: JobSpec, limit_s: float | None) -> Verification:
    """Follow the job to its end. Raises ``JobFailed`` where it has told nothing, and ``TimeoutError``."""
    try:
        outcome = Follower(store, job, _Quiet()).to_the_end(limit_s)
    except KeyboardInterrupt as error:
        queue.ask_to_cancel(store, job.job)
        raise Interrupted(f"{job.job} is being cancelled") from error
    last = ledgers.rounds(store, job.job).read().value
    key = layout.verification(job.job, last.number if last else 0)
    data = store.get(key)
    if data is None:
        tell_end(job, outcome)
        raise GpuctlError(f"job {job.job} ended without a result", f"see its output: gpuctl logs {job.job}")
    return decode(data, Verification, key)


@dataclass(slots=True)
class _Quiet(Printer):
    """Shows what rank 0 prints as progress."""

    def show(self, found: Iterable[Found]) -> None:
        for _, _, line in found:
            if line.get("rank") == 0 and line.get("stream") == "stdout":
                say(str(line.get("text", "")).rstrip())
