"""A process that raises, whose framework would wait for the others at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.trainers import failing_exit
from gpuctl.trainers.launchers.process_group import _SITE

RAISES = """
import atexit, sys
atexit.register(lambda: print("waits for the others", flush=True))
sys.stdout.write("not yet flushed")
raise KeyError("mine")
"""


@pytest.mark.parametrize("launcher", ["jax", "tensorflow", "horovod", "exec"])
def test_only_a_framework_s_process_does_not_wait(launcher: str) -> None:
    env = {**os.environ, "PYTHONPATH": _SITE, "GPUCTL_LAUNCHER": launcher}
    done = subprocess.run([sys.executable, "-c", RAISES], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "KeyError: 'mine'" in done.stderr
    assert done.stdout.startswith("not yet flushed")
    assert ("waits" in done.stdout) == (launcher == "exec")


SCRIPT = """
import atexit, sys
atexit.register(lambda: print("own", flush=True))
framework = lambda: print("waits for the others", flush=True)
framework.__module__ = "jax._src.api"
atexit.register(framework)
class Main: pass
assert sys.modules["__main__"].Main is Main
print(sys.argv, flush=True)
"""


def _run(tmp_path: Path, ending: str, *command: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(SCRIPT + ending)
    (tmp_path / "neighbour.py").write_text("NAME = 'beside'")
    words = failing_exit.run_by([sys.executable, *(command or (str(tmp_path / "script.py"),)), "a b"])
    assert failing_exit.__file__ in words
    return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("raise SystemExit(-1)", 255, ""),
        ("sys.exit('a sentence')", 1, "a sentence\n"),
        ("sys.exit([])", 1, "[]\n"),
    ],
)
def test_a_script_that_leaves_with_a_code_does_not_wait(tmp_path: Path, ending: str, code: int, said: str) -> None:
    done = _run(tmp_path, ending)
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout.splitlines() == [f"['{tmp_path}/script.py', 'a b']", "own"]


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)", "try: sys.exit(3)\nexcept SystemExit: pass"])
def test_a_script_that_has_done_its_work_says_goodbye(tmp_path: Path, ending: str) -> None:
    done = _run(tmp_path, ending)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == ["waits for the others", "own"]


def test_an_exception_is_told_from_the_scripts_first_line_on_and_by_its_own_hook(tmp_path: Path) -> None:
    done = _run(tmp_path, "import neighbour\ndef f(): raise KeyError(neighbour.NAME)\nf()")
    assert (done.returncode, done.stdout.splitlines()[1:]) == (1, ["own"])
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/script.py", line ')
    assert done.stderr.endswith("KeyError: 'beside'\n")
    hook = "sys.excepthook = lambda kind, *_: print('hooked', kind.__name__, file=sys.stderr)\nraise KeyError"
    done = _run(tmp_path, hook)
    assert (done.returncode, done.stderr) == (1, "hooked KeyError\n")


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    done = _run(tmp_path, "sys.exit(4)", "-u", "-m", "script")
    assert (done.returncode, done.stdout.splitlines()) == (4, [f"['{tmp_path}/script.py', 'a b']", "own"])


@pytest.mark.parametrize("command", [["./program", "x.py"], ["python3"], ["python3", "-c", "pass"], ["python3", "-m"]])
def test_other_commands_are_left_as_they_are(command: list[str]) -> None:
    assert failing_exit.run_by(command) == command
