"""A process that raises, whose framework would wait for the others at its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
