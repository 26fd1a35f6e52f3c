"""The agent: one process per node, the same on every provider.

It sends a heartbeat, mingles, and does what the newest round of each job says (``reconcile``). All decisions are in
``cluster``; all it knows of the job is ``RoundRun``. Its threads: this loop; the heartbeat; ``Peers``; the
interpreter's; a ``LogShipper`` per run.

A notice says that the node will be taken: SIGTERM, or the cloud's own (``preemption``). The agent tells rank 0, has its
workers drained, and leaves.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from pathlib import Path

import msgspec

from gpuctl import __version__
from gpuctl.bootstrap.agent.heartbeat import Heartbeat
from gpuctl.bootstrap.agent.host_files import HostFiles
from gpuctl.bootstrap.agent.log_shipper import LogShipper
from gpuctl.bootstrap.agent.reconcile import Reconciler
from gpuctl.bootstrap.agent.replica_server import ReplicaServer
from gpuctl.bootstrap.agent.round_run import RoundRun
from gpuctl.bootstrap.agent.round_work import AgentSurroundings, RoundWork
from gpuctl.bootstrap.containers.node_containers import Containers
from gpuctl.bootstrap.environments.fetch import place_of
from gpuctl.bootstrap.environments.node_environments import NodeEnvironments
from gpuctl.bootstrap.gpus import found_devices, visible_devices
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.bootstrap.jobs.interpreters import Interpreters
from gpuctl.bootstrap.jobs.node_jobs import NodeJobs
from gpuctl.bootstrap.jobs.runtimes import Runtimes
from gpuctl.bootstrap.launch import job_cgroup
from gpuctl.bootstrap.mirror.mirror import Mirror
from gpuctl.bootstrap.monitors.gpu_health import GpuHealth
from gpuctl.bootstrap.monitors.stall import StallWatch
from gpuctl.bootstrap.network.reachability import Reachability
from gpuctl.bootstrap.ports import PortPool
from gpuctl.bootstrap.wake import Wake
from gpuctl.cluster import layout
from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.clock import Clock, SystemClock
from gpuctl.cluster.disk import full_disk
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.membership.mingle import Mingle
from gpuctl.cluster.membership.peers import Peers
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.environments import EnvironmentBuild
from gpuctl.cluster.records.nodes import NodeRecord, PreemptionNotice
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.cluster.views import usage
from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.trainers.launchers.descendants import end_marked

ILL_S = 120.0
"""After so long a node that is ill waits no more for the end of its work: it may hang in the driver."""
SIGTERM = "SIGTERM"
"""Source of a notice that nobody but the system, or a person, gave: the machine itself may stay."""


class Agent:
    """A node's agent: one per node, until it is stopped or taken. Raises ``GpuctlError`` if it cannot begin; once it
    has, it outlives whatever the bucket does."""

    def __init__(self, folder: Path, identity: NodeIdentity, clock: Clock | None = None) -> None:
        self._folder = folder
        self._identity = identity
        self._clock = clock or SystemClock()
        self._incarnation = uuid.uuid4().hex[:12]
        self._started_at = self._clock.time()
        self._store: Bucket = open_bucket(identity.bucket, patience_s=3.0, timeout_s=5.0)
        self._spec = self._read_spec()
        self._devices = visible_devices(found_devices(), identity.env)
        self._slots = self._spec.slots or len(self._devices) or 1
        self._wake = Wake()
        self._base_env = {
            **os.environ,
            **identity.env,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }
        self._gpus = GpuHealth(self._base_env, self._devices, self._wake.set, say)
        self._ill_since: float | None = None
        self._heard = False
        self._risk = ""
        self._host_files = HostFiles(identity, self._clock)
        self._file_store: Bucket = open_bucket(identity.bucket)  # with the patience that large files need
        self._told_rank0: tuple[str, int] | None = None
        self._ports = PortPool(identity.address)
        self._peers = Peers(self._clock, token=self._spec.token, silent_s=self._spec.lease_s, on_news=self._wake.set)
        self._port = self._peers.start(identity.address)
        self._tiers = ReplicaServer(folder / "jobs", self._spec.token, folder / "environments" / "archives")
        self._tier_port = self._tiers.start(identity.address)
        self._runtimes = self._new_runtimes()
        self._jobs = NodeJobs(folder / "jobs", self._store, self._clock, self._runtimes, self._wake.set, say)
        self._mingle = Mingle(self._store, self._clock, self._peers, self._spec, self._record)
        self._heartbeat = Heartbeat(self._store, self._spec.heartbeat_s, self._mingle.heartbeat)
        self._reconciler = Reconciler(
            identity.node,
            self._incarnation,
            self._store,
            self._clock,
            self._mingle,
            self._begin,
            AgentSurroundings(self._heartbeat, self._peers, self._wake, say),
        )
        self._peers.introduce(self._record())
        self._reachability = Reachability(self._store, self._record, self._base_env, self._spec.provider)

    def serve(self) -> None:
        """Until the node has left, after a notice or because its folder was deleted: then nobody else knows of this
        process."""
        self._end_leftovers()
        self._heartbeat.send()
        self._heartbeat.start(lambda: self._clock.monotonic() - self._reconciler.ticked_at < self._spec.lease_s)
        self._reachability.start()
        self._gpus.start()
        self._jobs.remove_leftover_containers()
        self._runtimes.interpreters.of(None)
        trouble = ""
        while not self._reconciler.may_leave() and not NodeIdentity.was_deleted(self._folder):
            self._wake.wait(self._spec.heartbeat_s)
            try:
                self._turn()
                trouble = ""
            except (GpuctlError, OSError) as error:  # the bucket, or a full disk: training goes on, so does this loop
                if str(error) != trouble:
                    say(f"trying again: {error}")
                trouble = str(error)
        self._leave()

    def notice(self, lead_s: float, source: str) -> None:
        """The node will be taken in ``lead_s`` seconds. Safe in a signal handler; the first word counts."""
        self._reconciler.take_notice(lead_s, source)

    def at_risk(self, words: str) -> None:
        """The cloud thinks that the node may be taken: shown, and no more. Empty: not any longer."""
        self._risk = words

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        work = self._reconciler.work
        # Not what the rounds say of it: without the bucket they say the same for ever.
        works = work is not None and work.exit is None and not work.stall.stalled
        self._host_files.show(works=works, waits=bool(self._mingle.jobs))
        if self._reconciler.notice is not None and not self._heard:
            self._hear(self._reconciler.notice)
        if self._gpus.ill and self._ill_since is None:
            self._ill_since = self._clock.monotonic()
            say(f"no job will use this node any more: {self._gpus.ill}")
            self._heartbeat.send()
            self._peers.poke()
        self._reconciler.turn()
        if self._ill_since is not None and self._may_be_replaced(self._clock.monotonic() - self._ill_since):
            self._host_files.write_ill(self._gpus.ill)
        self._reachability.members(self._mingle.members)
        self._jobs.prepare(self._mingle.jobs)
        self._runtimes.keep(self._jobs.interpreters_wanted())
        self._jobs.drop_finished({work.run.round.job} if (work := self._reconciler.work) else set())
        self._write_rank0()

    def _may_be_replaced(self, ill_s: float) -> bool:
        """Whether a node that has been ill for so long has no work left to save."""
        work = self._reconciler.work
        return work is None or work.exit is not None or ill_s > ILL_S

    def _hear(self, notice: PreemptionNotice) -> None:
        self._heard = True
        say(f"this node will be preempted in {notice.lead_s:.0f} s ({notice.source})")
        if notice.source != SIGTERM:
            self._host_files.claim(notice.source)

    def _begin(self, round_: Round, rank: int) -> RoundWork:
        workspace = self._jobs.workspace(round_.job)
        round_dir = workspace.round_dir(round_.number)
        context = WorkerContext(
            cluster=self._spec.name,
            bucket=self._identity.bucket,
            job=round_.job,
            round=round_.number,
            node=self._identity.node,
            round_dir=round_dir,
            checkpoint_dir=workspace.folder / "checkpoints",
            tensorboard_dir=round_dir / "tensorboard",
        )
        say(f"{round_.job} round {round_.number}: rank {rank} of {len(round_.members)} ({round_.reason})")
        mirror = Mirror(self._file_store, self._jobs.checkpoint_folder(round_.job), round_, rank, self._clock, say)
        fabric = self._spec.promised.fabric if self._spec.promised else ""
        more = (self._clock, self._wake.set, self._spec.token, fabric, self._gpus.settle)
        run = RoundRun(round_, rank, workspace, context, mirror, *more)
        stall = StallWatch(run, 60 * self._spec.stall_minutes, self._clock, self._wake.set, say)
        work = RoundWork(run, LogShipper(self._store, run, self._clock), stall)
        run.start(self._runtimes, self._ports, self._base_env)
        stall.start()
        return work

    # -- what others see ----------------------------------------------------------------------------------------------

    def _record(self) -> NodeRecord:
        work = self._reconciler.work
        running = work.run if work and work.exit is None else None
        return NodeRecord(
            node=self._identity.node,
            incarnation=self._incarnation,
            beat=0,
            address=self._identity.address,
            port=self._port,
            slots=self._slots,
            devices=self._devices,
            tier_port=self._tier_port,
            spare_ports=self._ports.offered(),
            doing=self._runtimes.doing,
            trouble=full_disk(self._folder / "jobs") or full_disk(self._folder) or self._gpus.warning,
            health=self._gpus.ill or "ok",
            ready=self._runtimes.interpreters.is_ready and self._jobs.is_ready,
            notice=self._reconciler.notice,
            risk=self._risk,
            stalled=running is not None and work is not None and work.stall.stalled,
            still_s=round(work.stall.still_s, 1) if running is not None and work is not None else 0.0,
            ranks_left=running.ranks_left() if running else None,
            drainable=running is not None and running.is_drainable(),
            progress=running.progress() if running else None,
            version=__version__,
            started_at=self._started_at,
        )

    def _write_rank0(self) -> None:
        """``rank0.json`` in the node's folder: metadata for scripts and people, kept current."""
        holder = self._mingle.lease.holder
        if holder is None or self._told_rank0 == (holder.node, self._mingle.lease.epoch):
            return
        self._told_rank0 = (holder.node, self._mingle.lease.epoch)
        said = {"node": holder.node, "address": holder.address, "epoch": self._mingle.lease.epoch}
        write_atomic(self._folder / "rank0.json", msgspec.json.encode(said))
        self._host_files.write_rank0(msgspec.json.encode(said))

    # -- the beginning and the end ------------------------------------------------------------------------------------

    def _new_runtimes(self) -> Runtimes:
        env, changed, folder, me = self._base_env, self._wake.set, self._folder / "environments", self._identity
        place = place_of(me.address, self._tier_port)
        own = EnvironmentBuild(node=me.node, incarnation=self._incarnation, beat=0, address=place)
        return Runtimes(
            Interpreters(env, self._folder, changed),
            Containers(self._folder, self._file_store, me.env, os.environ, bool(self._devices), say, changed),
            NodeEnvironments(folder, self._file_store, own, self._spec.token, env, self._clock, say, changed),
        )

    def _read_spec(self) -> ClusterSpec:
        probe(self._store)
        data = self._store.get(layout.CLUSTER)
        if data is None:
            raise GpuctlError(f"no cluster found at {shown(self._identity.bucket)}", "create it with `gpuctl up`")
        return decode(data, ClusterSpec, layout.CLUSTER)

    def _leave(self) -> None:
        say(f"leaving{self._lead_words()}")
        if self._reconciler.work:
            self._reconciler.work.kill()
        self._runtimes.stop()
        self._gpus.stop()
        self._heartbeat.end()  # else a last one may come after it is rubbed out, and the node seems to be there
        with contextlib.suppress(GpuctlError):
            self._store.delete([layout.node(self._identity.node)])
            usage.note_end(self._store, self._identity.node, self._clock.time())
            self._reachability.stop()
        self._runtimes.interpreters.stop()
        self._end_leftovers()
        self._peers.stop()
        self._tiers.stop()
        self._ports.close()

    def _end_leftovers(self) -> None:
        """Processes of jobs here that have left their session: of this life of the agent, or of one that died."""
        left = job_cgroup.end_all(job_cgroup.delegated())
        left += end_marked(lambda folder: folder.is_relative_to(self._folder / "jobs"))
        if left:
            say(f"job processes that did not end: {', '.join(map(str, sorted({*left})))}")

    def _lead_words(self) -> str:
        notice = self._reconciler.notice
        if notice is None:
            return ""
        return f", {self._reconciler.left_s:.1f} of {notice.lead_s:.0f} s before the end ({notice.source})"


def say(line: str) -> None:
    """Print a line to the agent's log. The disk that takes it may be the one that is full."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
