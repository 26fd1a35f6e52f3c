"""``gpuctl status``"""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from gpuctl.cli.access import Access, reach
from gpuctl.cli.options import Bucket, Cluster, Output, wants_json
from gpuctl.cli.terminal import ago, number, out_json, size, styled, table
from gpuctl.cluster.refusals import shown
from gpuctl.cluster.status import CheckpointState, ClusterState, JobState, NodeState, read_cluster

_WATCH_S = 1.0


def verb(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until Ctrl-C.")] = False,
    output: Output = "text",
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Show the nodes, rank 0 and how far the jobs are."""
    as_json = wants_json(output)
    access = reach(cluster, bucket)
    if watch and not as_json:
        with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
            _watch(access)
        return
    while True:
        state = _read(access)
        if as_json:
            out_json(state)
        else:
            print("\n".join(lines(state)))
        if not watch:
            return
        time.sleep(_WATCH_S)


def lines(state: ClusterState) -> list[str]:
    """What ``status`` prints."""
    found = [*_head(state), ""]
    if state.nodes:
        found += [*_nodes(state), ""]
    else:
        found += ["no node has been heard of: gpuctl up", ""]
    found += _jobs(state) if state.jobs else ["no job yet: gpuctl train script.py"]
    return found


def _read(access: Access) -> ClusterState:
    return read_cluster(access.store, shown(access.cluster.bucket))


def _watch(access: Access) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(Text.from_ansi("\n".join(lines(_read(access)))), refresh=True)
            time.sleep(_WATCH_S)


def _head(state: ClusterState) -> list[str]:
    live = sum(node.state in ("live", "leaving") for node in state.nodes)
    most = f"{state.nodes_max}" if state.nodes_min == state.nodes_max else f"{state.nodes_min} to {state.nodes_max}"
    rank0 = f"rank 0 is {state.rank0} (epoch {state.epoch})" if state.rank0 else "no rank 0 yet"
    name = styled(state.cluster, "bold")
    return [f"{name}  {state.provider}, {live} of {most} nodes live, {rank0}", styled(state.bucket, "dim")]


def _nodes(state: ClusterState) -> list[str]:
    header = ("NODE", "STATE", "ADDRESS", "JOB", "RANK", "STEP", "LOSS", "STEPS/S", "SEEN")
    found = table(header, [_node(node) for node in state.nodes], give=[3])
    told = [f"{node.node}: {words}" for node in state.nodes for words in (node.doing, _taken(node)) if words]
    return [*found, *(styled(line, "dim") for line in told)]


def _node(node: NodeState) -> list[str]:
    return [
        node.node,
        node.state if node.health == "ok" else node.health,
        node.address,
        node.job or "-",
        number(node.rank),
        number(node.step),
        number(node.loss),
        number(node.steps_per_s),
        ago(node.seen_at),
    ]


def _taken(node: NodeState) -> str:
    """What the cloud has said of its end."""
    if node.notice is None:
        return node.risk
    return f"notice of {node.notice.lead_s:.0f} s, {ago(node.notice.at)} ({node.notice.source})"


def _jobs(state: ClusterState) -> list[str]:
    header = ("JOB", "STATE", "ROUND", "NODES", "STEP", "LOSS", "STEPS/S", "LAST CHECKPOINT")
    found = table(header, [_job(job) for job in state.jobs], give=[7, 0])
    for job in state.jobs:
        if job.reason and job.state != "succeeded":
            found.append(styled(f"{job.job}: {job.reason}", "dim"))
    return found


def _job(job: JobState) -> list[str]:
    return [
        job.job,
        job.state,
        number(job.round),
        number(job.nodes) if job.ended_at is None else "-",
        number(job.step),
        number(job.loss),
        number(job.steps_per_s),
        checkpoint_words(job.checkpoint),
    ]


def checkpoint_words(checkpoint: CheckpointState | None) -> str:
    if checkpoint is None:
        return "-"
    return f"step {checkpoint.step}, {size(checkpoint.bytes)}, {ago(checkpoint.at)}"
