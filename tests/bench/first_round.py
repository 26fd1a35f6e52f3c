"""From the start of a round to its workers' first all-reduce: a warm interpreter's fork beside torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

from gpuctl.bootstrap.launch.interpreter import Interpreter
from gpuctl.stacks.providers import processes
from gpuctl.trainers.launchers.torchrun import LaunchSpec
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row
from tests.waiting import until

SCRIPT = Path(__file__).with_name("first_reduce.py")
_WORKERS = 2


def launch(settings: Settings) -> Row:
    root = settings.root / "launch"
    root.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", processes.MARK: str(root)}
    interpreter = Interpreter(env, root / "interpreter.log", lambda: None)
    try:
        until(lambda: interpreter.is_ready, "a warm interpreter")
        ours = [_ours(interpreter, root / f"ours-{run}", env) for run in range(settings.runs)]
    finally:
        interpreter.stop()
    reference = [_torchrun(root / f"torchrun-{run}", env) for run in range(settings.runs)]
    note = f"{spread(ours)} beside {spread(reference)}; {_WORKERS} workers on one node"
    return Row("launch", median(ours), median(reference), "s", "<= 0.32 s", median(ours) <= 0.32, note)


def _ours(interpreter: Interpreter, folder: Path, env: dict[str, str]) -> float:
    folder.mkdir()
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        spec = LaunchSpec(
            job="launch-1",
            round=1,
            rank=0,
            nodes=1,
            nproc=_WORKERS,
            address="127.0.0.1",
            master_address="127.0.0.1",
            master_port=listening.getsockname()[1],
            script=str(SCRIPT),
            args=(str(folder),),
            cwd=str(folder),
            env=env,
            log_dir=str(folder / "logs"),
        )
        began = time.monotonic()
        interpreter.launch(spec, listening, fresh=False, on_exit=lambda _: over.set())
        until(over.is_set, "the workers to end")
    return _last(folder) - began


def _torchrun(folder: Path, env: dict[str, str]) -> float:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_WORKERS)]
    began = time.monotonic()
    subprocess.run([*command, str(SCRIPT), str(folder)], check=True, env=env, stderr=subprocess.DEVNULL)
    return _last(folder) - began


def _last(folder: Path) -> float:
    """When the last rank's all-reduce was done."""
    return max(float((folder / str(rank)).read_text()) for rank in range(_WORKERS))
