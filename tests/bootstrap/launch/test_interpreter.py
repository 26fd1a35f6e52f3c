"""The warm interpreter and its fresh twin, with real processes."""

from __future__ import annotations

import contextlib
import ctypes
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

from gpuctl.bootstrap.launch.interpreter import Interpreter, LauncherExit
from gpuctl.cluster.worker_context import STDERR_MARK
from gpuctl.stacks.providers import processes
from gpuctl.trainers.launchers.torchrun import LaunchSpec, needs_fresh
from tests.fakes.shared_objects import DRIVER, build
from tests.gloo_lines import without_gloo
from tests.waiting import PATIENCE_S


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changed = threading.Event()
        self.exits: queue.Queue[LauncherExit] = queue.Queue()
        self.interpreter = Interpreter(dict(os.environ), folder / "log", self.changed.set)

    def wait_until_ready(self) -> None:
        while not self.interpreter.is_ready:
            assert self.changed.wait(PATIENCE_S), (self.folder / "log").read_text()
            self.changed.clear()

    def launch(
        self, script: str, *, fresh: bool = False, nproc: int = 1, launcher: str = "torchrun", **env: str
    ) -> LaunchSpec:
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
                launcher=launcher,
                hosts=("127.0.0.1",),
                nprocs=(nproc,),
            )
            self.launched = self.interpreter.launch(spec, listening, fresh=fresh, on_exit=self.exits.put)
        return spec

    def ended(self) -> LauncherExit:
        return self.exits.get(timeout=PATIENCE_S)

    def printed(self, local_rank: int = 0) -> str:
        return without_gloo(self.written(local_rank).replace(STDERR_MARK.decode(), ""))

    def written(self, local_rank: int = 0) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"logs/*/attempt_0/{local_rank}/std*.log"))

    def failures(self) -> list[tuple[int, int]]:
        """Local rank and exit code."""
        return [(failure.local_rank, failure.exit_code) for failure in self.ended().failures]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.interpreter.stop()


SAY = "import os, sys; print(sys.argv[1:], os.environ['RANK'], __name__, os.environ.get('EXTRA'))\n"


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_a_script_runs_as_under_python_in_a_warm_or_a_fresh_interpreter(bench: Bench, fresh: bool) -> None:
    bench.launch(SAY, fresh=fresh, EXTRA="yes")
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "['a', 'b c'] 0 __main__ yes\n"


@pytest.mark.slow
def test_a_script_of_another_launcher_begins_anew_with_the_jobs_own_variables(bench: Bench) -> None:
    bench.launch(SAY + "print('torch' in sys.modules, os.environ['GPUCTL_LAUNCHER'])", launcher="exec", EXTRA="yes")
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "['a', 'b c'] 0 __main__ yes\nFalse exec\n"
    bench.launch("import os, sys; sys.exit(int(os.environ['RANK']) * 4)", launcher="exec", nproc=2)
    assert bench.failures() == [(1, 4)]
    bench.launch("", launcher="horovod")
    assert "has no horovod on this node; install it there: " in bench.ended().error


SAY_WHO_DESTROYS = "import torch.distributed as d; print(hasattr(d.destroy_process_group, '__wrapped__'))"


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_gloo_groups_are_kept_by_a_worker_and_by_what_it_becomes(bench: Bench, fresh: bool) -> None:
    """See ``gloo_exit``."""
    becomes = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {SAY_WHO_DESTROYS!r}])"
    bench.launch(f"{SAY_WHO_DESTROYS}\n{becomes}\n", fresh=fresh, PYTHONPATH="/theirs")
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "True\nTrue\n"


@pytest.mark.slow
def test_exit_codes_signals_and_exceptions_are_told_by_local_rank(bench: Bench) -> None:
    bench.launch("import sys; sys.exit(3)")
    assert bench.failures() == [(0, 3)]
    bench.launch("import os; os.kill(os.getpid(), 9)")
    assert bench.failures() == [(0, 137)]
    bench.launch("def f():\n    raise KeyError('x')\nf()\n")
    assert bench.failures() == [(0, 1)]
    assert "KeyError: 'x'" in bench.printed() and "runpy" not in bench.printed()
    bench.launch("raise SystemExit('a sentence')")
    assert bench.failures() == [(0, 1)]
    assert "a sentence" in bench.printed()


MIXES = """
import os, sys, logging, warnings
for i in range(100):
    print("out", i)
    print("err", i, file=sys.stderr)
os.write(2, b"native\\n")
os.system("echo child >&2")
print("before")
raise KeyError("led to")
"""


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_printed_stands_in_the_order_in_which_it_was_written(bench: Bench, fresh: bool) -> None:
    bench.launch(MIXES, fresh=fresh)
    assert bench.failures() == [(0, 1)]
    lines = bench.printed().splitlines()
    assert lines[:200] == [f"{stream} {i}" for i in range(100) for stream in ("out", "err")]
    assert lines[200:204] == ["native", "child", "before", "Traceback (most recent call last):"]
    marked = [line for line in bench.written().splitlines() if line.startswith(STDERR_MARK.decode())]
    assert len(marked) == 100 + 4 and all("out" not in line for line in marked)


@pytest.mark.slow
def test_a_worker_that_failed_is_told_with_its_pid(bench: Bench) -> None:
    bench.launch("import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 9)")
    assert bench.ended().failures[0].pid == int(bench.printed())


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["sys.exit()", "sys.exit(0)", "raise SystemExit"])
def test_a_script_that_leaves_early_and_without_an_error_has_ended_well(bench: Bench, leave: str) -> None:
    bench.launch(f"import sys; print('x')\n{leave}")
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "x\n"


@pytest.mark.slow
def test_exit_functions_run_and_a_handler_of_sigterm_is_the_scripts_own(bench: Bench) -> None:
    bench.launch(
        "import atexit, signal\natexit.register(print, 'goodbye')\nprint(signal.getsignal(15) == signal.SIG_DFL)\n"
    )
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "True\ngoodbye\n"


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["warm", "fresh"])
def test_nobody_has_asked_cuda_before_a_worker_is_forked(bench: Bench, fresh: bool) -> None:
    """Else no worker could use a GPU. A torch that is built for CUDA knows it where there is no GPU, too."""
    bench.launch("import torch\nprint(torch.cuda._is_in_bad_fork())\n", fresh=fresh)
    assert (bench.ended(), bench.printed()) == (LauncherExit(), "False\n")


@pytest.mark.slow
def test_workers_meet_through_the_held_port(bench: Bench) -> None:
    script = (
        "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nprint('met', d.get_world_size())\n"
    )
    bench.launch(script, nproc=2)
    assert bench.ended() == LauncherExit()
    assert bench.printed(0) == bench.printed(1) == "met 2\n"


@pytest.mark.slow
def test_kill_ends_the_launcher_its_workers_and_what_they_started(bench: Bench) -> None:
    bench.launch("import subprocess, time\nprint(subprocess.Popen(['sleep', '1000']).pid)\ntime.sleep(1000)\n")
    _wait_for(lambda: bench.printed().endswith("\n"))
    grandchild = psutil.Process(int(bench.printed()))
    bench.launched.kill()
    assert bench.ended() == LauncherExit(killed=True)
    assert processes.wait_until_ended([grandchild], 10) == []


LEAVES = """
import subprocess, sys, time
gone = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={{}})
daemon = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], env={{}}, stdout=subprocess.PIPE)
print(gone.pid, int(daemon.stdout), flush=True)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["warm", "fresh"])
@pytest.mark.parametrize("then", ["", "sys.exit(3)", "time.sleep(1000)"], ids=["done", "failed", "killed"])
def test_what_a_worker_started_in_a_session_of_its_own_has_ended_when_its_end_is_told(
    bench: Bench, fresh: bool, then: str
) -> None:
    """They have an empty environment, so no mark: they are found because they are below the interpreter."""
    bench.launch(LEAVES.format(then=then), fresh=fresh)
    _wait_for(lambda: len(bench.printed().split()) == 2)
    strays = [int(pid) for pid in bench.printed().split()]
    if then.startswith("time"):
        bench.launched.kill()
    bench.ended()
    assert not any(map(psutil.pid_exists, strays))
    bench.launch(SAY)
    assert bench.ended() == LauncherExit()


@pytest.mark.slow
def test_a_new_interpreter_that_cannot_begin_is_told_with_its_last_lines(bench: Bench) -> None:
    bench.launch(SAY, fresh=True, PYTHONHOME="/nowhere")
    assert "no Python frame" in bench.ended().error


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["warm", "fresh"])
@pytest.mark.parametrize(
    "leave",
    [
        "os._exit(0)",
        "atexit.register(lambda: os._exit(0))",
        "os.execv('/bin/sh', ['sh', '-c', 'sleep 0.5; echo again'])",
    ],
    ids=["_exit", "atexit", "exec"],
)
def test_a_worker_that_leaves_without_a_word_has_ended_well(bench: Bench, fresh: bool, leave: str) -> None:
    """Others are waited for."""
    script = f"import atexit, os, time\nif os.environ['LOCAL_RANK'] == '1':\n    {leave}\nelse:\n    time.sleep(1)\n"
    bench.launch(f"{script}    print('done')\n", fresh=fresh, nproc=2)
    assert bench.failures() == []
    assert bench.printed(0) == "done\n"
    assert bench.printed(1) == ("again\n" if "exec" in leave else "")


@pytest.mark.slow
def test_a_worker_that_executed_another_program_hides_no_failure_of_others(bench: Bench) -> None:
    script = (
        "import os, sys, time\nif os.environ['LOCAL_RANK'] == '0':\n    os.execv('/bin/sleep', ['sleep', '1000'])\n"
    )
    bench.launch(f"{script}time.sleep(1)\nsys.exit(3)\n", nproc=2)
    assert (1, 3) in bench.failures()


FORKS = """
import os, signal, sys, time
if os.environ["LOCAL_RANK"] == "1":
    {other}
daemon = os.fork()
if daemon == 0:
    os.setsid()
    time.sleep(1000)
print(daemon, flush=True)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["warm", "fresh"])
@pytest.mark.parametrize(
    ("then", "other", "code"),
    [
        ("", "sys.exit()", None),
        ("sys.exit(3)", "time.sleep(1000)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(1000)", 137),
    ],
    ids=["done", "failed", "killed"],
)
def test_a_daemon_that_a_worker_forked_does_not_keep_its_end_from_being_told(
    bench: Bench, fresh: bool, then: str, other: str, code: int | None
) -> None:
    """It has all that the worker had open, and so the pipe by which torch's launcher sees the worker's end."""
    bench.launch(FORKS.format(then=then, other=other), fresh=fresh, nproc=2)
    assert (0, code) in bench.failures() if code else bench.failures() == []
    with contextlib.suppress(psutil.NoSuchProcess):
        assert processes.wait_until_ended([psutil.Process(int(bench.printed()))], 10) == []


@pytest.mark.slow
def test_when_the_interpreter_dies_its_workers_die_and_the_next_round_has_a_new_one(bench: Bench) -> None:
    bench.launch("import time, os\nprint(os.getpid())\ntime.sleep(1000)\n")
    _wait_for(lambda: bench.printed().endswith("\n"))
    worker = psutil.Process(int(bench.printed()))
    bench.wait_until_ready()
    os.kill(bench.interpreter._process.pid, signal.SIGKILL)
    assert bench.ended() == LauncherExit(killed=True)
    assert processes.wait_until_ended([worker], 10) == []
    _wait_for(lambda: bench.interpreter.state == "dead")
    bench.interpreter.keep()
    bench.launch(SAY)
    assert bench.ended() == LauncherExit()


@pytest.mark.slow
def test_what_a_script_imports_can_be_there_before_it_runs(bench: Bench) -> None:
    (bench.folder / "slow_to_import.py").write_text("raise RuntimeError('of the folder, so never preloaded')\n")
    bench.interpreter.preload(["wave", "no_such_module_here"])
    bench.wait_until_ready()
    bench.launch("import sys; print('wave' in sys.modules, 'torch' in sys.modules)\n")
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "True True\n"


BEGINS_CUDA = """
import ctypes, os
driver = ctypes.CDLL("{driver}")
code = driver.cuInit(0)
print("asks NVML:", os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), flush=True)
"""
USES_CUDA = "import sys; warm = 'torch._dynamo' in sys.modules; import begins_cuda; print(begins_cuda.code, warm)\n"
WAITS = "import os, time; print('runs', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"


@pytest.fixture
def begins_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that begins CUDA when it is imported, as some extensions do: the machine's, if it has it,
    which the interpreter finds first by the name that both have."""
    driver = "libcuda.so.1"
    try:
        ctypes.CDLL(driver)
    except OSError:
        driver = str(build(tmp_path / "cuda" / driver, DRIVER, f"-Wl,-soname,{driver}"))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "begins_cuda.py").write_text(BEGINS_CUDA.format(driver=driver))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    return "begins_cuda"


@pytest.mark.slow
def test_a_job_whose_imports_begin_cuda_can_use_it(begins_cuda: str, bench: Bench) -> None:
    """In the forks of a process in which it has begun, CUDA does not work."""
    bench.interpreter.preload([begins_cuda])
    bench.launch(USES_CUDA)  # before it is known what the import does
    assert bench.ended() == LauncherExit()
    bench.wait_until_ready()
    assert bench.interpreter.state == "spoiled" and f"['{begins_cuda}']" in (bench.folder / "log").read_text()
    bench.launch(USES_CUDA)
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "asks NVML: None\n0 False\n" * 2


@pytest.mark.slow
def test_while_imports_are_awaited_torch_looks_for_gpus_without_beginning_cuda(begins_cuda: str, bench: Bench) -> None:
    """Many modules ask torch.cuda.is_available() when they are imported."""
    bench.interpreter.preload([begins_cuda])
    bench.wait_until_ready()
    assert "asks NVML: 1\n" in (bench.folder / "log").read_text()


@pytest.mark.slow
def test_an_interpreter_that_is_spoiled_is_replaced_when_its_jobs_are_over(begins_cuda: str, bench: Bench) -> None:
    bench.wait_until_ready()
    bench.launch(WAITS)
    _wait_for(lambda: bench.printed() == "runs\n")
    bench.interpreter.preload([begins_cuda])
    _wait_for(lambda: bench.interpreter.state == "spoiled")
    bench.interpreter.keep()
    assert bench.interpreter.state == "spoiled" and bench.interpreter.is_ready and bench.exits.empty()
    (bench.folder / "go").touch()
    assert bench.ended() == LauncherExit()

    def kept() -> bool:
        bench.interpreter.keep()
        return bench.interpreter.state == "ready"

    _wait_for(kept)
    bench.launch(USES_CUDA)
    assert bench.ended() == LauncherExit()
    assert "0 True\n" in bench.printed(), "forked, and what begins CUDA is the worker's to import"


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
