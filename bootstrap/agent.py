"""The agent: one process per node, the same on every provider.

It sends a heartbeat, mingles, and does what the newest round of each job says. All decisions are in ``cluster``; all it
knows of the job is ``Run``. Its threads: this loop; the heartbeat; ``Peers``; the interpreter's; a shipper per run.

A notice says that the node will be taken: SIGTERM, or the cloud's own (``notices``). The agent tells rank 0, has its
workers drained, and leaves.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
from msgspec.structs import replace

from gpuctl import __version__
from gpuctl.bootstrap.boot.metadata import Metadata
from gpuctl.bootstrap.devices import found_devices
from gpuctl.bootstrap.folder import Folder
from gpuctl.bootstrap.heartbeat import Heartbeat
from gpuctl.bootstrap.identity import Identity
from gpuctl.bootstrap.interpreter import Interpreter
from gpuctl.bootstrap.mirror import Mirror
from gpuctl.bootstrap.notices import CLOUDS, Watcher
from gpuctl.bootstrap.ports import PortPool
from gpuctl.bootstrap.reachability import Reachability
from gpuctl.bootstrap.run import Run
from gpuctl.bootstrap.runtime import Containers
from gpuctl.bootstrap.shipping import Shipper
from gpuctl.bootstrap.stall import StallWatch
from gpuctl.bootstrap.tier_server import TierServer
from gpuctl.bootstrap.traces import Traces
from gpuctl.bootstrap.workspace import JobWorkspace
from gpuctl.cluster import layout, stays
from gpuctl.cluster.bucket import Bucket, open_bucket, probe
from gpuctl.cluster.clock import Clock, SystemClock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.mingle import Mingle
from gpuctl.cluster.peers import Peers
from gpuctl.cluster.records import ClusterSpec, NodeExit, NodeRecord, Notice, Round, decode, encode
from gpuctl.cluster.refusals import shown
from gpuctl.cluster.worker import WorkerContext

SIGTERM = "SIGTERM"
"""Source of a notice that nobody but the system, or a person, gave: the machine itself may stay."""


@dataclass(slots=True)
class _Active:
    run: Run
    shipper: Shipper
    stall: StallWatch
    reported: bool = False


class Agent:
    """Raises ``GpuctlError`` if it cannot begin; once it has, it outlives whatever the bucket does."""

    def __init__(self, folder: Path, identity: Identity, clock: Clock | None = None) -> None:
        self._folder = folder
        self._identity = identity
        self._clock = clock or SystemClock()
        self._incarnation = uuid.uuid4().hex[:12]
        self._started_at = self._clock.time()
        self._store: Bucket = open_bucket(identity.bucket, patience_s=3.0, timeout_s=5.0)
        self._spec = self._read_spec()
        self._devices = found_devices()
        self._slots = self._spec.slots or len(self._devices) or 1
        self._wake = threading.Event()
        self._interpreter: Interpreter | None = None
        self._notice: Notice | None = None
        self._leave_by: float | None = None
        self._heard = False
        self._risk = ""
        self._traces = Traces(identity, self._clock)
        self._active: _Active | None = None
        self._unsent: list[NodeExit] = []
        self._workspaces: dict[str, JobWorkspace] = {}
        self._file_store: Bucket = open_bucket(identity.bucket)  # with the patience that large files need
        self._file_folders: dict[str, Folder] = {}
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="preparer")
        self._prepared: set[str] = set()
        self._preparing = 0
        self._ticked_at = self._clock.monotonic()
        self._told_rank0: tuple[str, int] | None = None
        self._containers = Containers(folder, identity.env, os.environ, bool(self._devices), _say, self._wake.set)
        self._ports = PortPool(identity.address)
        self._peers = Peers(self._clock, token=self._spec.token, silent_s=self._spec.lease_s, on_news=self._wake.set)
        self._port = self._peers.start(identity.address)
        self._tiers = TierServer(folder / "jobs", self._spec.token)
        self._tier_port = self._tiers.start(identity.address)
        self._peers.introduce(self._record())
        self._mingle = Mingle(self._store, self._clock, self._peers, self._spec, self._record)
        self._heartbeat = Heartbeat(self._store, self._spec.heartbeat_s, self._mingle.heartbeat)
        self._base_env = {
            **os.environ,
            **identity.env,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }
        self._reachability = Reachability(self._store, self._record, self._base_env, self._spec.provider)

    def serve(self) -> None:
        """Until the node has left after a notice."""
        self._heartbeat.send()
        self._heartbeat.start(lambda: self._clock.monotonic() - self._ticked_at < self._spec.lease_s)
        self._reachability.start()
        self._preparer.submit(self._containers.sweep)
        self._interpreter = Interpreter(self._base_env, self._folder / "interpreter.log", self._wake.set)
        trouble = ""
        while not self._may_leave():
            self._wake.wait(self._spec.heartbeat_s)
            self._wake.clear()
            try:
                self._turn()
                trouble = ""
            except (GpuctlError, OSError) as error:  # the bucket, or a full disk: training goes on, so does this loop
                if str(error) != trouble:
                    _say(f"trying again: {error}")
                trouble = str(error)
        self._leave()

    def notice(self, lead_s: float, source: str) -> None:
        """The node will be taken in ``lead_s`` seconds. Safe in a signal handler; the first word counts."""
        if self._notice is None:
            self._leave_by = self._clock.monotonic() + lead_s
            self._notice = Notice(lead_s=lead_s, at=self._clock.time(), source=source)
            self._wake.set()

    def at_risk(self, words: str) -> None:
        """The cloud thinks that the node may be taken: shown, and no more. Empty: not any longer."""
        self._risk = words

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        assert self._interpreter is not None
        self._interpreter.keep()
        active = self._active
        # Not what the rounds say of it: without the bucket they say the same for ever.
        works = active is not None and active.run.exit is None and not active.stall.stalled
        self._traces.show(works=works, waits=bool(self._mingle.jobs))
        if self._notice is not None and not self._heard:
            self._hear(self._notice)
        if self._notice is not None and not self._heartbeat.told_of_notice:
            self._tell()
        decided = self._mingle.tick()
        self._ticked_at = self._clock.monotonic()
        self._reachability.members(self._mingle.members)
        if decided:
            self._tell()
        self._obey()
        self._report()
        self._prepare_jobs()
        self._clear_tiers()
        self._write_rank0()

    def _hear(self, notice: Notice) -> None:
        self._heard = True
        _say(f"this node will be taken in {notice.lead_s:.0f} s ({notice.source})")
        if notice.source != SIGTERM:
            self._traces.claim(notice.source)

    def _tell(self) -> None:
        """What is new here, to all who should look."""
        self._heartbeat.send()
        self._peers.poke()

    def _obey(self) -> None:
        """Have the one run that the newest rounds ask of this node, and no other."""
        wanted = self._wanted()
        active = self._active
        if active and (wanted is None or not active.run.is_of(wanted)):
            if active.run.exit is None:
                active.run.kill()
                return  # its end wakes the loop, and one run at a time
            self._finish(active)
            active = self._active = None
        if wanted and wanted.phase == "run" and active is None:
            self._begin(wanted)
        elif wanted and wanted.phase == "drain" and active and active.run.exit is None:
            active.run.ask_to_stop(wanted)

    def _wanted(self) -> Round | None:
        mine = (self._identity.node, self._incarnation)
        rounds = (version.value for version in self._mingle.jobs.values())
        return next((r for r in rounds if r and r.phase in ("run", "drain") and r.rank_of(*mine) is not None), None)

    def _begin(self, round_: Round) -> None:
        assert self._interpreter is not None
        rank = round_.rank_of(self._identity.node, self._incarnation)
        assert rank is not None
        workspace = self._workspace(round_.job)
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
        _say(f"{round_.job} round {round_.number}: rank {rank} of {len(round_.members)} ({round_.reason})")
        folder = self._file_folders.setdefault(round_.job, Folder(context.checkpoint_dir))
        mirror = Mirror(self._file_store, folder, round_, rank, self._clock, _say)
        run = Run(round_, rank, workspace, context, mirror, self._clock, self._wake.set, self._spec.token)
        stall = StallWatch(run, 60 * self._spec.stall_minutes, self._clock, self._wake.set, _say)
        self._active = _Active(run, Shipper(self._store, run, self._clock), stall)
        run.start(self._interpreter, self._containers, self._ports, self._base_env)
        stall.start()

    def _report(self) -> None:
        """Send the exit of a run that ended, its last words before it."""
        active = self._active
        if active and active.run.exit and not active.reported:
            active.reported = True
            if active.run.exit.status != "stopped":
                active.shipper.finish()
            self._unsent.append(self._with_notice(active.run.exit))
        while self._unsent:
            node_exit = self._unsent[0]
            key = layout.node_exit(node_exit.job, node_exit.round, node_exit.node)
            self._store.put(key, encode(node_exit))
            del self._unsent[0]
            _say(f"{node_exit.job} round {node_exit.round}: {node_exit.status}")
            self._peers.poke()
            self._wake.set()  # if this is rank 0 itself, it has something to decide

    def _finish(self, active: _Active) -> None:
        active.stall.stop()
        if not active.reported and active.run.exit:
            self._unsent.append(self._with_notice(active.run.exit))
        threading.Thread(target=active.shipper.finish, name="last-logs", daemon=True).start()

    def _with_notice(self, node_exit: NodeExit) -> NodeExit:
        if self._notice is None or self._leave_by is None:
            return node_exit
        left_s = round(self._leave_by - self._clock.monotonic(), 3)
        return replace(node_exit, notice=self._notice, left_s=left_s)

    def _prepare_jobs(self) -> None:
        """Have the code and the imports of every unfinished job here before a round needs them."""
        for job in self._mingle.jobs:
            if job not in self._prepared:
                self._prepared.add(job)
                self._preparing += 1
                self._preparer.submit(self._prepare, self._workspace(job))

    def _prepare(self, workspace: JobWorkspace) -> None:
        assert self._interpreter is not None
        try:
            if image := workspace.prepare().image:
                self._containers.fetch(image, lambda: workspace.folder.name not in self._mingle.jobs)
            else:
                self._interpreter.preload(workspace.imports())
        except (GpuctlError, OSError) as error:
            _say(f"cannot prepare {workspace.folder.name} yet: {error}")
        finally:
            self._preparing -= 1
            self._wake.set()

    def _clear_tiers(self) -> None:
        """A job that is over needs no copies of its checkpoints."""
        for job in self._workspaces.keys() - self._mingle.jobs.keys():
            if self._active is None or self._active.run.round.job != job:
                shutil.rmtree(self._workspaces.pop(job).tier, ignore_errors=True)

    def _workspace(self, job: str) -> JobWorkspace:
        if job not in self._workspaces:
            self._workspaces[job] = JobWorkspace(self._store, self._folder / "jobs" / job, job)
        return self._workspaces[job]

    # -- what others see ----------------------------------------------------------------------------------------------

    def _record(self) -> NodeRecord:
        active = self._active
        running = active.run if active and active.run.exit is None else None
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
            doing=self._containers.doing,
            ready=self._interpreter is not None and self._interpreter.is_ready and self._preparing == 0,
            notice=self._notice,
            risk=self._risk,
            stalled=running is not None and active is not None and active.stall.stalled,
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
        path = self._folder / "rank0.json"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(said))
        partial.replace(path)
        self._traces.write_rank0(msgspec.json.encode(said))

    # -- the beginning and the end ------------------------------------------------------------------------------------

    def _read_spec(self) -> ClusterSpec:
        probe(self._store)
        data = self._store.get(layout.CLUSTER)
        if data is None:
            raise GpuctlError(f"there is no cluster at {shown(self._identity.bucket)}", "create it with `gpuctl up`")
        return decode(data, ClusterSpec, layout.CLUSTER)

    def _may_leave(self) -> bool:
        if self._notice is None or self._leave_by is None:
            return False
        if self._clock.monotonic() > self._leave_by:
            return True
        return self._active is None and not self._unsent and self._heartbeat.told_of_notice and not self._wanted()

    def _leave(self) -> None:
        _say(f"leaving{self._lead_words()}")
        if self._active:
            self._active.run.kill()
        self._containers.stop()
        self._heartbeat.end()  # else a last one may come after it is rubbed out, and the node seems to be there
        with contextlib.suppress(GpuctlError):
            self._store.delete([layout.node(self._identity.node)])
            stays.note_end(self._store, self._identity.node, self._clock.time())
            self._reachability.stop()
        if self._interpreter:
            self._interpreter.stop()
        self._peers.stop()
        self._tiers.stop()
        self._ports.close()

    def _lead_words(self) -> str:
        if self._notice is None or self._leave_by is None:
            return ""
        left_s = self._leave_by - self._clock.monotonic()
        return f", {left_s:.1f} of {self._notice.lead_s:.0f} s before the end ({self._notice.source})"


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main(folder: str) -> None:
    """Run the agent of the node whose files are in ``folder``; SIGTERM is its notice."""
    path = Path(folder).absolute()
    identity = decode((path / "identity.json").read_bytes(), Identity, str(path / "identity.json"))
    try:
        agent = Agent(path, identity)
    except GpuctlError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        agent.notice(_lead_s(path, identity), SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = None
    if identity.provider in CLOUDS:
        metadata = Metadata(identity.provider)
        watcher = Watcher(metadata, agent.notice, agent.at_risk, _say, promised_s=identity.promised_s)
        watcher.start()
    try:
        agent.serve()
    except GpuctlError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    if watcher:
        watcher.stop()


def _lead_s(folder: Path, identity: Identity) -> float:
    """Seconds from a SIGTERM to the end: whoever sends one may say so in ``notice_s`` first."""
    try:
        return float((folder / "notice_s").read_text())
    except (OSError, ValueError):
        return identity.notice_s


if __name__ == "__main__":
    main(sys.argv[1])
