"""How a node's part in a round ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpuctl.bootstrap.folder import Folder
from gpuctl.bootstrap.interpreter import Interpreter, Launched, OnExit
from gpuctl.bootstrap.mirror import Mirror
from gpuctl.bootstrap.ports import PortPool
from gpuctl.bootstrap.run import Run
from gpuctl.bootstrap.runtime import Containers
from gpuctl.bootstrap.workspace import JobWorkspace
from gpuctl.cluster import layout
from gpuctl.cluster.bucket import open_bucket
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.records import JobSpec, Member, NodeExit, Round, encode
from gpuctl.cluster.worker import DRAINED, WorkerContext
from gpuctl.trainers.launch import LaunchSpec

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


class OneProcess(Interpreter):
    """Runs the script with no launcher and no torch."""

    def __init__(self, *args: str) -> None:
        self._args = args

    def launch(self, spec: LaunchSpec, listening: socket.socket | None, *, fresh: bool, on_exit: OnExit) -> Launched:
        assert listening and not fresh
        log = Path(spec.log_dir) / "x" / "attempt_0" / "0" / "stderr.log"
        log.parent.mkdir(parents=True)
        with log.open("w") as stderr:
            process = subprocess.Popen([sys.executable, spec.script, *self._args], stderr=stderr)
        threading.Thread(target=lambda: on_exit([] if process.wait(30) == 0 else "it failed"), daemon=True).start()
        return Launched(process.pid)


def run(tmp_path: Path, how: str) -> tuple[NodeExit, str]:
    """A script whose files cannot be kept; returns its end and its log."""
    store = open_bucket((tmp_path / "bucket").as_uri())
    spec = JobSpec(job="job-1", number=1, script="train.py", code="", nodes_min=1, nodes_max=1)
    store.put(layout.job_spec("job-1"), encode(spec))
    workspace = JobWorkspace(store, tmp_path / "job", "job-1")
    workspace.code.mkdir(parents=True)
    (workspace.code / "train.py").write_text(SCRIPT)
    context = WorkerContext(
        cluster="default",
        bucket=store.url,
        job="job-1",
        round=1,
        node="node-0",
        round_dir=workspace.round_dir(1),
        checkpoint_dir=workspace.folder / "checkpoints",
        tensorboard_dir=workspace.round_dir(1) / "tensorboard",
    )
    ports, clock, ended = PortPool("127.0.0.1", 1), SystemClock(), threading.Event()
    member = Member(node="node-0", incarnation="i", address="127.0.0.1", nproc=1)
    (port,) = ports.offered()
    round_ = Round(
        job="job-1", number=1, phase="run", epoch=1, members=(member,), master_address="127.0.0.1", master_port=port
    )
    mirror = Mirror(store, Folder(context.checkpoint_dir), round_, 0, clock, print)
    part = Run(round_, 0, workspace, context, mirror, clock, ended.set)
    script = OneProcess(str(context.round_dir / f"{DRAINED}.0"), str(context.checkpoint_dir), how)
    containers = Containers(tmp_path, {}, os.environ, False, print, ended.clear)
    try:
        part.start(script, containers, ports, {})
        assert ended.wait(30)
    finally:
        ports.close()
    assert part.exit
    return part.exit, next(part.log_dir.rglob("stderr.log")).read_text()


@pytest.mark.parametrize("how", ["drained", "completed"])
def test_it_is_told_that_the_last_files_of_a_script_could_not_be_kept(tmp_path: Path, how: str) -> None:
    node_exit, log = run(tmp_path, how)
    what = "the last files in $GPUCTL_CHECKPOINT_DIR could not be kept: [Errno 36] File name too long"
    if how == "completed":
        assert node_exit.status == "failed"
        assert node_exit.ranks[0].message.startswith(what)
    else:
        assert node_exit.status == "drained"
        assert node_exit.ranks == ()
        assert log.startswith(f"gpuctl: {what}") and log.endswith("; the next round begins with those before\n")
