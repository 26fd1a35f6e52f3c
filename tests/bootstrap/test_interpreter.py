"""The warm interpreter and its fresh twin, with real processes."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.interpreter import Ending, Interpreter
from gpuctl.stacks import processes
from gpuctl.trainers.launch import LaunchSpec, WorkerFailure, needs_fresh

PATIENCE_S = 60


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changed = threading.Event()
        self.exits: queue.Queue[Ending] = queue.Queue()
        self.interpreter = Interpreter(dict(os.environ), folder / "log", self.changed.set)

    def wait_until_ready(self) -> None:
        while not self.interpreter.is_ready:
            assert self.changed.wait(PATIENCE_S), (self.folder / "log").read_text()
            self.changed.clear()

    def launch(self, script: str, *, fresh: bool = False, nproc: int = 1, **env: str) -> LaunchSpec:
        path = self.folder / "script.py"
        path.write_text(script)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            spec = LaunchSpec(
                job="job",
                round=1,
                rank=0,
                nodes=1,
                nproc=nproc,
                address="127.0.0.1",
                master_address="127.0.0.1",
                master_port=listening.getsockname()[1],
                script=str(path),
                args=("a", "b c"),
                cwd=str(self.folder),
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env},
                log_dir=str(self.folder / "logs"),
            )
            self.launched = self.interpreter.launch(spec, listening, fresh=fresh, on_exit=self.exits.put)
        return spec

    def ended(self) -> Ending:
        return self.exits.get(timeout=PATIENCE_S)

    def printed(self, local_rank: int = 0) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"logs/*/attempt_0/{local_rank}/std*.log"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.interpreter.stop()


SAY = "import os, sys; print(sys.argv[1:], os.environ['RANK'], __name__, os.environ.get('EXTRA'))\n"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_script_runs_as_under_python_in_a_warm_or_a_fresh_interpreter(bench: Bench, fresh: bool) -> None:
    bench.launch(SAY, fresh=fresh, EXTRA="yes")
    assert bench.ended() == []
    assert bench.printed() == "['a', 'b c'] 0 __main__ yes\n"


def test_exit_codes_signals_and_exceptions_are_told_by_local_rank(bench: Bench) -> None:
    bench.launch("import sys; sys.exit(3)")
    assert bench.ended() == [WorkerFailure(local_rank=0, exit_code=3)]
    bench.launch("import os; os.kill(os.getpid(), 9)")
    assert bench.ended() == [WorkerFailure(local_rank=0, exit_code=137)]
    bench.launch("def f():\n    raise KeyError('x')\nf()\n")
    assert bench.ended() == [WorkerFailure(local_rank=0, exit_code=1)]
    assert "KeyError: 'x'" in bench.printed() and "runpy" not in bench.printed()
    bench.launch("raise SystemExit('a sentence')")
    assert bench.ended() == [WorkerFailure(local_rank=0, exit_code=1)]
    assert "a sentence" in bench.printed()


@pytest.mark.parametrize("leave", ["sys.exit()", "sys.exit(0)", "raise SystemExit"])
def test_a_script_that_leaves_early_and_without_an_error_has_ended_well(bench: Bench, leave: str) -> None:
    bench.launch(f"import sys; print('x')\n{leave}")
    assert bench.ended() == []
    assert bench.printed() == "x\n"


def test_exit_functions_run_and_a_handler_of_sigterm_is_the_scripts_own(bench: Bench) -> None:
    bench.launch(
        "import atexit, signal\natexit.register(print, 'goodbye')\nprint(signal.getsignal(15) == signal.SIG_DFL)\n"
    )
    assert bench.ended() == []
    assert bench.printed() == "True\ngoodbye\n"


def test_workers_meet_through_the_held_port(bench: Bench) -> None:
    script = (
        "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nprint('met', d.get_world_size())\n"
    )
    bench.launch(script, nproc=2)
    assert bench.ended() == []
    assert bench.printed(0) == bench.printed(1) == "met 2\n"


def test_kill_ends_the_launcher_its_workers_and_what_they_started(bench: Bench) -> None:
    bench.launch("import subprocess, time\nprint(subprocess.Popen(['sleep', '1000']).pid)\ntime.sleep(1000)\n")
    _wait_for(lambda: bench.printed().endswith("\n"))
    grandchild = psutil.Process(int(bench.printed()))
    bench.launched.kill()
    assert bench.ended() is None
    assert processes.wait_until_ended([grandchild], 10) == []


def test_when_the_interpreter_dies_its_workers_die_and_the_next_round_has_a_new_one(bench: Bench) -> None:
    bench.launch("import time, os\nprint(os.getpid())\ntime.sleep(1000)\n")
    _wait_for(lambda: bench.printed().endswith("\n"))
    worker = psutil.Process(int(bench.printed()))
    bench.wait_until_ready()
    os.kill(bench.interpreter._process.pid, signal.SIGKILL)
    assert bench.ended() is None
    assert processes.wait_until_ended([worker], 10) == []
    _wait_for(lambda: bench.interpreter.state == "dead")
    bench.interpreter.keep()
    bench.launch(SAY)
    assert bench.ended() == []


def test_what_a_script_imports_can_be_there_before_it_runs(bench: Bench) -> None:
    (bench.folder / "slow_to_import.py").write_text("raise RuntimeError('of the folder, so never preloaded')\n")
    bench.interpreter.preload(["wave", "no_such_module_here"])
    bench.wait_until_ready()
    bench.launch("import sys; print('wave' in sys.modules, 'torch' in sys.modules)\n")
    assert bench.ended() == []
    assert bench.printed() == "True True\n"


def test_variables_that_count_only_at_the_start_of_a_process_ask_for_a_fresh_one() -> None:
    assert (
        needs_fresh({"PYTHONHASHSEED": "1"})
        and needs_fresh({"LD_PRELOAD": "x"})
        and needs_fresh({"OMP_PROC_BIND": "1"})
    )
    assert not needs_fresh({"LR": "0.1", "WANDB_API_KEY": "k", "NCCL_DEBUG": "INFO"})


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
