"""How a node's part in a round ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from gpuctl.bootstrap.agent.round_run import RoundRun
from gpuctl.bootstrap.containers.node_containers import Containers
from gpuctl.bootstrap.environments.disk import NodeEnvironment
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed
from gpuctl.bootstrap.environments.node_environments import NodeEnvironments
from gpuctl.bootstrap.jobs.interpreters import Interpreters
from gpuctl.bootstrap.jobs.runtimes import Runtimes
from gpuctl.bootstrap.jobs.workspace import JobWorkspace
from gpuctl.bootstrap.launch.interpreter import Interpreter, Launched, LauncherExit, OnExit
from gpuctl.bootstrap.mirror.mirror import Mirror
from gpuctl.bootstrap.mirror.watched_folder import WatchedFolder
from gpuctl.bootstrap.ports import PortPool
from gpuctl.cluster import layout
from gpuctl.cluster.clock import Clock, SystemClock
from gpuctl.cluster.errors import GpuctlError, StoreUnavailable
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.membership.rounds import CANCELLED
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.environments import EnvironmentBuild
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.rounds import Member, NodeExit, Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.worker_context import DEADLINE, DRAINED, STDERR_MARK, WorkerContext
from gpuctl.trainers.launchers.torchrun import LaunchSpec
from tests.fakes.clock import HandClock
from tests.waiting import PATIENCE_S, until

# The kernel takes no path of more than 4096 bytes: nobody who names it in one sees what lies there.
SCRIPT = """
import os, pathlib, sys
if "drained" in sys.argv: pathlib.Path(sys.argv[1]).touch()
os.chdir(sys.argv[2])
for _ in range(17):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
open("model", "w").close()
"""

# Leaves a file in the folder of the job: all of it, or half of it before it fails or hangs.
WRITER = """
import pathlib, sys, time
how = sys.argv[3]
pathlib.Path(sys.argv[2], "model").write_text("whole" if how == "whole" else "ha")
if how == "fails": sys.exit(1)
if how == "hangs": time.sleep(600)
"""


# Leaves a process with a session of its own, and tells which.
LEAVER = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[2], "model").write_text(str(child.pid))
"""


class OneProcess(Interpreter):
    """Runs the script with no launcher and no torch. ``meanwhile`` is done while the run does not know of it yet."""

    def __init__(self, *args: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._args = args
        self._meanwhile = meanwhile

    def launch(self, spec: LaunchSpec, listening: socket.socket | None, *, fresh: bool, on_exit: OnExit) -> Launched:
        assert listening and not fresh
        log = Path(spec.log_dir) / "x" / "attempt_0" / "0" / "stdout.log"
        log.parent.mkdir(parents=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, spec.script, *self._args],
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.env},
            )

        def wait() -> None:
            on_exit(LauncherExit(error="" if process.wait(30) == 0 else "it failed"))

        threading.Thread(target=wait, daemon=True).start()
        self._meanwhile()
        return Launched(process.pid)


class OneInterpreter(Interpreters):
    """There is none but ``process``."""

    def __init__(self, process: OneProcess, folder: Path) -> None:
        super().__init__({}, folder, lambda: None)
        self._process = process

    def take(self, environment: NodeEnvironment | None) -> Interpreter:
        assert environment is None
        return self._process


def environments(folder: Path, store: Bucket, refused: GpuctlError | None) -> NodeEnvironments:
    """Those of a node, on which the job's can be had unless it is ``refused``."""
    own = EnvironmentBuild(node="node-0", incarnation="i", beat=0)

    class Environments(NodeEnvironments):
        def have(self, *args: Any, **more: Any) -> NodeEnvironment | None:
            if refused:
                raise refused
            return super().have(*args, **more)

    return Environments(folder / "environments", store, own, "", {}, SystemClock(), print, lambda: None)


class Away(Bucket):
    """Does not answer."""

    def list(self, prefix: str, after: str | None = None) -> Any:  # noqa: ARG002
        raise StoreUnavailable("the bucket did not answer")


def run(
    tmp_path: Path,
    how: str,
    *,
    script: str = SCRIPT,
    number: int = 1,
    clock: Clock | None = None,
    launching: Callable[[RoundRun], None] = lambda _: None,
    running: Callable[[RoundRun], None] = lambda _: None,
    say: Callable[[str], None] = print,
    away: bool = False,
    port_is_free: bool = True,
    ill: Callable[[float], str] = lambda _: "",
    nodes: int = 1,
    fabric: str = "",
    allow_tcp: bool = False,
    strategy: str = "",
    refused: GpuctlError | None = None,
    **env: str,
) -> tuple[NodeExit, str]:
    """A script, by default one whose files cannot be kept; returns its end and its log, empty if it never ran.
    ``launching`` and ``running`` are done while it starts and while it runs. ``say`` hears what its files need, which
    come from a bucket that does not answer if it is ``away``. ``ill`` tells of GPUs, ``refused`` why there can be no
    environment. ``env``: the node's."""
    store = open_bucket((tmp_path / "bucket").as_uri())
    job = JobSpec(job="job-1", number=1, script="train.py", nodes_min=1, nodes_max=nodes)
    spec = msgspec.structs.replace(job, allow_tcp=allow_tcp, strategy=strategy)
    store.put(layout.job_spec("job-1"), encode(spec))
    workspace = JobWorkspace(store, tmp_path / "job", "job-1")
    workspace.code.mkdir(parents=True, exist_ok=True)
    (workspace.code / "train.py").write_text(script)
    context = WorkerContext(
        cluster="default",
        bucket=store.url,
        job="job-1",
        round=number,
        node="node-0",
        round_dir=workspace.round_dir(number),
        checkpoint_dir=workspace.folder / "checkpoints",
        tensorboard_dir=workspace.round_dir(number) / "tensorboard",
    )
    ports, clock, ended = PortPool("127.0.0.1", 1), clock or SystemClock(), threading.Event()
    members = tuple(Member(node=f"node-{n}", incarnation="i", address="127.0.0.1", nproc=1) for n in range(nodes))
    (port,) = ports.offered()
    round_ = Round(
        job="job-1", number=number, phase="run", epoch=1, members=members, master_address="127.0.0.1", master_port=port
    )
    files = Away(store.raw, store.url) if away else store
    mirror = Mirror(files, WatchedFolder(context.checkpoint_dir), round_, 0, clock, say)
    part = RoundRun(round_, 0, workspace, context, mirror, clock, ended.set, fabric=fabric, ill=ill)
    drained = str(context.round_dir / f"{DRAINED}.0")
    process = OneProcess(drained, str(context.checkpoint_dir), how, meanwhile=lambda: launching(part))
    containers = Containers(tmp_path, store, {}, os.environ, False, print, ended.clear)
    taken = None if port_is_free else ports.take(port)
    try:
        runtimes = Runtimes(OneInterpreter(process, tmp_path), containers, environments(tmp_path, store, refused))
        part.start(runtimes, ports, env)
        running(part)
        assert ended.wait(30)
    finally:
        ports.close()
        if taken:
            taken.close()
    assert part.exit
    logs = [path.read_text().replace(STDERR_MARK.decode(), "") for path in part.log_dir.rglob("stdout.log")]
    return part.exit, "".join(logs)


@pytest.mark.parametrize("how", ["drained", "completed"])
def test_it_is_told_that_the_last_files_of_a_script_could_not_be_kept(tmp_path: Path, how: str) -> None:
    node_exit, log = run(tmp_path, how)
    what = "the last files in $GPUCTL_CHECKPOINT_DIR could not be saved: [Errno 36] File name too long"
    if how == "completed":
        assert node_exit.status == "failed"
        assert node_exit.ranks[0].message.startswith(what)
    else:
        assert node_exit.status == "drained"
        assert node_exit.ranks == ()
        assert log.startswith(f"gpuctl: {what}") and log.endswith("; the next round starts from the previous ones\n")


def test_several_nodes_do_not_begin_over_tcp_where_a_fabric_was_paid_for(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"nodes": 2, "fabric": "efa", "LD_LIBRARY_PATH": str(tmp_path)}
    node_exit, _ = run(tmp_path / "1", "drained", **asked)
    assert node_exit.status == "failed"
    assert node_exit.ranks[0].message.startswith(
        "could not start: NCCL cannot use EFA on this node: its plug-in cannot be loaded (libnccl-net.so: "
    )
    otherwise: list[dict[str, Any]] = [{"allow_tcp": True}, {"nodes": 1}, {"fabric": "gvnic"}, {"NCCL_NET": "Socket"}]
    for number, how in enumerate(otherwise):
        assert run(tmp_path / f"also {number}", "drained", **{**asked, **how})[0].status == "drained", how


def half_written(tmp_path: Path) -> bool:
    model = tmp_path / "job" / "checkpoints" / "model"
    return model.exists() and model.read_text() == "ha"


def kill_once_it_has_written(tmp_path: Path, part: RoundRun) -> None:
    until(lambda: half_written(tmp_path), "half a file")
    part.kill()


@pytest.mark.parametrize(("how", "status"), [("fails", "failed"), ("hangs", "stopped")])
def test_half_a_file_of_workers_that_failed_or_were_killed_replaces_no_whole_one(
    tmp_path: Path, how: str, status: str
) -> None:
    assert run(tmp_path, "whole", script=WRITER)[0].status == "completed"
    end: Callable[[RoundRun], None] = partial(kill_once_it_has_written, tmp_path) if how == "hangs" else lambda _: None
    assert run(tmp_path, how, script=WRITER, number=2, running=end)[0].status == status
    store, members = (
        open_bucket((tmp_path / "bucket").as_uri()),
        (Member(node="node-1", incarnation="i", address="127.0.0.1", nproc=1),),
    )
    third = Round(job="job-1", number=3, phase="run", epoch=1, members=members)
    Mirror(store, WatchedFolder(tmp_path / "fresh"), third, 0, SystemClock(), print).restore({})
    assert (tmp_path / "fresh" / "model").read_text() == "whole"


def test_a_run_that_is_ended_while_it_launches_leaves_no_workers(tmp_path: Path) -> None:
    assert run(tmp_path, "hangs", script=WRITER, launching=RoundRun.kill)[0].status == "stopped"


def test_before_its_workers_are_up_a_run_cannot_be_stopped_without_a_loss(tmp_path: Path) -> None:
    """A node that joins waits for them: else what they have just begun to load is loaded in vain."""
    told: list[bool] = []

    def look(part: RoundRun) -> None:
        until(lambda: half_written(tmp_path), "the launcher")
        told.append(part.is_drainable())
        part.kill()

    run(tmp_path, "hangs", script=WRITER, running=look)
    assert told == [False]


def test_what_its_workers_have_left_running_ends_with_it(tmp_path: Path) -> None:
    """It may hold a GPU that the next round needs."""
    assert run(tmp_path, "", script=LEAVER)[0].status == "completed"
    left = int((tmp_path / "job/checkpoints/model").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(left)
        lives = process.status() != psutil.STATUS_ZOMBIE
        process.kill()
        assert not lives


# Makes what ``Trainer`` makes of the variable, unless it is not to; fails if asked to.
CHOOSER = """
import os, sys
from gpuctl.trainers.strategies.chosen import chosen
print("found", os.environ.get("GPUCTL_STRATEGY"))
if sys.argv[3] == "reads": chosen()
sys.exit(sys.argv[3] == "fails")
"""


@pytest.mark.parametrize("how", ["reads", "ignores", "fails"])
def test_a_worker_finds_its_strategy_and_a_script_that_makes_nothing_of_it_is_told(tmp_path: Path, how: str) -> None:
    node_exit, log = run(tmp_path, how, script=CHOOSER, strategy="topk:ratio=0.01")
    told = "gpuctl: --strategy topk:ratio=0.01 had no effect: the script makes no gpuctl.Trainer\n"
    assert log == "found topk:ratio=0.01\n" + (told if how == "ignores" else "")
    assert node_exit.status == ("failed" if how == "fails" else "completed")


def test_a_worker_without_a_strategy_finds_none(tmp_path: Path) -> None:
    assert run(tmp_path, "ignores", script=CHOOSER, GPUCTL_STRATEGY="int8")[1] == "found None\n"


@pytest.mark.parametrize(("refused", "ended"), [(EnvironmentFailed, True), (GpuctlError, False)])
def test_a_job_whose_packages_no_node_can_have_is_over_at_once(
    tmp_path: Path, refused: type[GpuctlError], ended: bool
) -> None:
    node_exit, log = run(tmp_path, "completed", refused=refused("requirements.txt: no such package", "check its name"))
    assert (node_exit.status, log) == ("failed", "")
    assert "requirements.txt: no such package" in node_exit.ranks[0].message
    outcome = queue.outcome(open_bucket((tmp_path / "bucket").as_uri()), "job-1")
    told = outcome and (outcome.result, outcome.message, outcome.hint)
    assert told == (("failed", "requirements.txt: no such package", "check its name") if ended else None)


@pytest.mark.parametrize(("how", "told"), [("fails", "GPU 0: Xid 79"), ("whole", "")])
def test_whoever_fails_is_asked_for_the_health_of_its_gpus(tmp_path: Path, how: str, told: str) -> None:
    """In its exit, since a heartbeat may come later: by then the script would have been blamed."""
    assert run(tmp_path, how, script=WRITER, ill=lambda _: "GPU 0: Xid 79")[0].ill == told


def cancel(part: RoundRun) -> None:
    part.ask_to_stop(msgspec.structs.replace(part.round, phase="drain", reason=CANCELLED, drain_s=600.0))


@pytest.mark.parametrize("end", [RoundRun.kill, cancel])
def test_a_run_that_waits_for_its_files_is_ended_at_once_and_has_not_failed(
    tmp_path: Path, end: Callable[[RoundRun], None]
) -> None:
    said = threading.Event()

    def once_it_waits(part: RoundRun) -> None:
        assert said.wait(PATIENCE_S)
        end(part)

    node_exit, _ = run(tmp_path, "whole", script=WRITER, away=True, say=lambda _: said.set(), running=once_it_waits)
    assert node_exit.status == "stopped"
    assert not (tmp_path / "job/checkpoints/model").exists()


def test_a_round_whose_port_was_taken_is_begun_anew_and_its_script_is_not_blamed(tmp_path: Path) -> None:
    node_exit, _ = run(tmp_path, "whole", script=WRITER, port_is_free=False)
    assert node_exit.status == "stopped"
    assert node_exit.ranks[0].message == "the port offered for this round is in use"


def test_a_script_that_does_not_stop_is_killed_at_the_drains_deadline(tmp_path: Path) -> None:
    """Which it is told, by this machine's monotonic clock."""
    clock = HandClock()
    deadline = clock.now + 30.0

    def drain(part: RoundRun) -> None:
        until(lambda: half_written(tmp_path), "half a file")
        drained = msgspec.structs.replace(part.round, phase="drain", reason="node-1 joined", drain_s=30.0)
        part.ask_to_stop(drained)
        clock.now += 29.0
        part.ask_to_stop(drained)
        assert part.exit is None
        assert float((part.context.round_dir / DEADLINE).read_text()) == deadline
        clock.now += 2.0
        part.ask_to_stop(drained)

    assert run(tmp_path, "hangs", script=WRITER, clock=clock, running=drain)[0].status == "stopped"
