"""``gpuctl status``: shows nodes, rank 0 and the progress of jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated, NoReturn

import typer
from msgspec.structs import replace

from gpuctl.cli.render.terminal import ago, number, out_json, size, styled, table
from gpuctl.cli.session.open_cluster import OpenCluster, reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, wants_json
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.cluster.views.job_status import CheckpointState, JobState
from gpuctl.cluster.views.status import ClusterState, NodeState, read_cluster

_WATCH_S = 1.0
_UNHEARD = ("silent", "lost")


def verb(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    output: Output = "text",
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Show nodes, rank 0 and the progress of jobs."""
    as_json = wants_json(output)
    access = reach(cluster, bucket)
    if not watch:
        _print(_read(access), as_json)
        return
    with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
        if sys.stdout.isatty() and not as_json:
            _watch(access)
        while True:
            _print(_read(access), as_json)
            sys.stdout.flush()
            time.sleep(_WATCH_S)


def _print(state: ClusterState, as_json: bool) -> None:
    if as_json:
        out_json(state)
    else:
        print("\n".join(lines(state)))


def lines(state: ClusterState) -> list[str]:
    """The lines that ``status`` prints."""
    found = [*_head(state), *([styled(state.trouble, "red")] if state.trouble else []), ""]
    if state.nodes:
        found += [*_nodes(state), ""]
    else:
        found += ["no node has reported yet; start some with: gpuctl up", ""]
    found += _jobs(state) if state.jobs else ["no jobs yet; start one with: gpuctl train script.py"]
    return found


def _read(access: OpenCluster) -> ClusterState:
    state = read_cluster(access.store, shown(access.cluster.bucket))
    if any(node.state in _UNHEARD for node in state.nodes) and (why := access.why_ended()):
        return _with_ended(state, access.cluster.name, why)
    return state


def _with_ended(state: ClusterState, name: str, why: str) -> ClusterState:
    """``state`` with what only this machine knows: its nodes that have ended, and ``why``."""
    from gpuctl.stacks.providers.local_nodes import ended_nodes

    ended = ended_nodes(name)
    for job in state.jobs:
        if job.ended_at is None and job.round:
            why += f", and {job.job} goes on" + (f" from step {job.checkpoint.step}" if job.checkpoint else "")
    return replace(
        state,
        nodes=tuple(replace(node, state="ended") if node.node in ended else node for node in state.nodes),
        rank0=None if state.rank0 in ended else state.rank0,
        trouble="; ".join(filter(None, (state.trouble, why))),
    )


def _watch(access: OpenCluster) -> NoReturn:
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
    rank0 = f"rank 0 is {state.rank0} (epoch {state.epoch})" if state.rank0 else "no rank 0"
    name = styled(state.cluster, "bold")
    return [f"{name}  {state.provider}, {live} of {most} nodes live, {rank0}", styled(state.bucket, "dim")]


def _nodes(state: ClusterState) -> list[str]:
    header = ("NODE", "STATE", "ADDRESS", "JOB", "RANK", "STEP", "LOSS", "STEPS/S", "SEEN")
    found = table(header, [_node(node) for node in state.nodes], give=[3])
    told = [
        f"{node.node}: {words}"
        for node in state.nodes
        for words in (_illness(node), node.doing, node.trouble, _taken(node))
        if words
    ]
    return [*found, *(styled(line, "dim") for line in told)]


def _node(node: NodeState) -> list[str]:
    return [
        node.node,
        "ill" if _illness(node) else node.state if node.health == "ok" else node.health,
        node.address,
        node.job or "-",
        number(node.rank),
        number(node.step),
        number(node.loss),
        number(node.steps_per_s),
        ago(node.seen_at),
    ]


def _illness(node: NodeState) -> str:
    return "" if node.health in ("ok", "stalled") else node.health


def _taken(node: NodeState) -> str:
    """The cloud's word on the end of a node: its notice, or else why it may be taken sooner than others."""
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
