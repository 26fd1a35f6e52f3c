"""The ``local`` provider: nodes that are processes on this machine, each with its own directory and loopback address.

A real backend with the real agent: what runs here runs the same way on rented machines. Nodes share the machine's
cores, so each worker gets its part of them.

::

    <state>/local/<cluster>/nodes/<node>/   identity.json, process.json, agent.log, jobs/…
    <state>/buckets/<cluster>/              the bucket, unless --bucket names another; stays after ``down``

All of it is for this user alone: a job's environment is in the bucket, and with it whatever token it was given.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

import psutil

from gpuctl.bootstrap.gpus import found_devices
from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.errors import BadInput, CorruptRecord, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.views import job_status
from gpuctl.cluster.views.holders import is_live, now_by, printable, read_record
from gpuctl.stacks.providers import local_preemption, processes
from gpuctl.stacks.providers.interface import CanPreempt, UpRequest, UsesMachines
from gpuctl.stacks.providers.local_nodes import (
    end_nodes,
    is_short_of_gpus,
    is_up,
    locked,
    may_restart,
    new_node_dir,
    node_count,
    node_dirs,
    root_of,
    start_agent,
    wait_until_live,
    write_identities,
)
from gpuctl.stacks.providers.ownership import bucket_of, forget_nodes, is_me, settle
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster
from gpuctl.stacks.state.paths import state_dir

HEARTBEAT_S = 0.5
LEASE_S = 3.0
_NOTICE_S = 30.0
"""For nodes that a smaller ``up`` ends: time for a last checkpoint."""
_NODES_PER_CORE = 16
_NODE_BYTES = 100_000_000
"""Of memory: an agent without work has 65 MB."""
_NODE_DISK_BYTES = 1_000_000
"""For the files that an agent without work has, and the cluster's records."""
_ALWAYS = 8
"""Nodes that any machine is let try."""


class LocalProvider(UsesMachines, CanPreempt):
    """Nodes as processes on this machine."""

    def up(self, request: UpRequest) -> KnownCluster:
        say = self._dialog.say
        _refuse_too_many(request.nodes_max or 1)
        with locked(request.name):
            running = [folder for folder in node_dirs(request.name) if is_up(folder)]
            _refuse_full_disk((request.nodes_max or 1) - len(running))
            url = bucket_of(request, usual=(state_dir() / "buckets" / request.name).as_uri())
            bucket = open_bucket(url)
            probe(bucket)
            _refuse_elsewhere(bucket, request.name)
            gpus = len(found_devices())
            if running and gpus:
                _refuse_other_shares(bucket, request)
            spec = settle(bucket, request, _new_spec(request.name), say)
            kept, surplus = running[: spec.nodes_max], running[spec.nodes_max :]
            missing = spec.nodes_max - len(kept)
            folders = [folder for folder in node_dirs(request.name) if may_restart(folder)][:missing]
            while len(folders) < missing:
                folders.append(new_node_dir(request.name, reserved=folders))
            write_identities(folders, url, spec, gpus, beside=kept)
            for folder in folders:
                start_agent(folder, bucket)
            wait_until_live(folders, bucket)
            left = end_nodes(surplus, _NOTICE_S)
        if folders and is_short_of_gpus(gpus, spec):
            say("there are fewer GPUs than workers, so all train on the CPU; to use GPUs, make fewer nodes or slots")
        say(f"{node_count(len(folders))} started" + (f", {len(kept)} already running" if kept else ""))
        if surplus:
            say(f"{node_count(len(surplus))} ended: {', '.join(folder.name for folder in surplus)}")
        if left:
            up = clusters.command("up", request.name)
            raise GpuctlError(f"{len(left)} of their processes still run", f"run `{up}` again")
        return clusters.find(request.name)

    def down(self, cluster: KnownCluster, *, force: bool = False) -> list[str]:  # noqa: ARG002
        with locked(cluster.name):
            root = root_of(cluster.name)
            count = sum(1 for folder in node_dirs(cluster.name) if is_up(folder))
            left = processes.kill_all(root)
            self._dialog.say(f"{node_count(count)} ended")
            if left:
                return [f"process {p.pid} ({' '.join(p.cmdline())[:80]})" for p in left]
            with suppress(GpuctlError):  # whose record is damaged, or which cannot be had
                forget_nodes(open_bucket(cluster.bucket), of=cluster.id)
            shutil.rmtree(root / "nodes", ignore_errors=True)
            clusters.forget(cluster.name)
            return []

    def check_down(self, cluster: KnownCluster) -> None:
        with suppress(StoreError, StoreUnavailable, CorruptRecord):  # without its bucket it goes too
            _refuse_elsewhere(open_bucket(cluster.bucket), cluster.name)

    def preempt(self, cluster: KnownCluster, node: str, notice_s: float, replace_after_s: float | None) -> None:
        """Have a process of its own take the node away; see ``CanPreempt``.

        Args:
            cluster: the cluster that the node is of.
            node: its name; it must be running.
            notice_s: seconds from the notice to SIGKILL; 0: no notice, it is killed at once.
            replace_after_s: seconds from the end to a replacement; ``None``: there is none.

        Raises ``BadInput`` if no node of that name runs.
        """
        folder = root_of(cluster.name) / "nodes" / node
        if not is_up(folder):
            running = ", ".join(f.name for f in node_dirs(cluster.name) if is_up(f))
            hint = f"running nodes: {running}" if running else "none runs; `gpuctl up` starts what has ended"
            raise BadInput(f"cluster {cluster.name!r} has no running node {node!r}", hint)
        local_preemption.start(cluster.name, node, notice_s, replace_after_s, self._dialog.say)


# -- how many ---------------------------------------------------------------------------------------------------------


def _refuse_too_many(nodes: int) -> None:
    """Raises ``BadInput`` for more than this machine could run agents of."""
    memory = psutil.virtual_memory().total
    by_memory, by_cores = int(memory // _NODE_BYTES), (os.cpu_count() or 1) * _NODES_PER_CORE
    most = max(_ALWAYS, min(by_memory, by_cores))
    if nodes > most:
        has = f"{memory / 1e9:.0f} GB of memory and {os.cpu_count() or 1} cores"
        raise BadInput(
            f"{nodes} nodes are too many for one machine with {has}",
            f"use --nodes {most} or fewer, or another --provider",
        )


def _refuse_full_disk(nodes: int) -> None:
    """Raises ``GpuctlError`` where that many more would be left half made."""
    folder = state_dir()
    if nodes > 0 and shutil.disk_usage(folder).free < nodes * _NODE_DISK_BYTES:
        raise GpuctlError(f"no room for {node_count(nodes)} on the disk that holds {folder}", "free some space")


def _refuse_elsewhere(bucket: Bucket, name: str) -> None:
    """Somebody who attached has not its nodes: one more ``node-0`` would depose the first, and no process ends from
    here. Raises ``BadInput`` if nodes of another owner's cluster live that are not of this state folder."""
    there, noted = read_record(bucket), clusters.get(name)
    if there is None or noted is None or there.id != noted.id or not there.owner or is_me(there.owner):
        return
    here, now = {folder.name for folder in node_dirs(name)}, now_by(bucket)
    live = [beat.record.node for beat in job_status.read_heartbeats(bucket) if is_live(beat, now)]
    if elsewhere := [node for node in live if node not in here]:
        owner = printable(there.owner)
        raise BadInput(
            f"the nodes of {name!r} are processes of {owner}: {printable(', '.join(elsewhere))}",
            f"run that there; `{clusters.command('status', name)}` and `train` work here",
        )


def _refuse_other_shares(bucket: Bucket, request: UpRequest) -> None:
    """Each node that runs has its GPUs, as many as the number of nodes left it: with another number two would have the
    same. Raises ``BadInput``."""
    there = read_record(bucket)
    if there and request.nodes_max is not None and request.nodes_max != there.nodes_max:
        raise BadInput(
            f"the nodes of {there.name!r} share this machine's GPUs, in {there.nodes_max} parts",
            f"run `{clusters.command('down', there.name)}` first, which keeps the checkpoints",
        )


def _new_spec(name: str) -> ClusterSpec:
    """The spec of a new cluster, with defaults."""
    return ClusterSpec(name=name, provider="local", nodes_min=1, nodes_max=1, heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S)
