"""What the tests see is the same wherever they run, and whoever runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import environment
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

_SHOW = """
import os, signal, sys
from tests import environment
environment.clean()
os.execv(sys.executable, [sys.executable, "-c", '''
import os, signal
print(*(signal.getsignal(one) == signal.SIG_DFL for one in (signal.SIGHUP, signal.SIGQUIT)))
print(signal.getsignal(signal.SIGINT) == signal.default_int_handler)
print(os.readlink("/proc/self/fd/0") if os.path.exists("/proc/self/fd/0") else "/dev/null")
print(oct(os.umask(0)))
'''])
"""


def test_what_tells_of_a_person_is_gone_and_what_finds_programs_stays(tmp_path: Path) -> None:
    found = {"HOME": "/home/kim", "PATH": "/bin", "AWS_PROFILE": "mine", "SSH_AUTH_SOCK": "/s", "PIP_INDEX_URL": "i"}
    seen = environment.of({**found, "COLUMNS": "40", "LANG": "de_DE", "GPUCTL_CLUSTER": "mine"})
    assert seen.items() >= {"PATH": "/bin", "PIP_INDEX_URL": "i", "HOME": "/home/kim", "LC_ALL": "C.UTF-8"}.items()
    assert not seen.keys() & {"AWS_PROFILE", "SSH_AUTH_SOCK", "COLUMNS", "LANG", "GPUCTL_CLUSTER"}
    assert seen[environment.CACHE] == "/home/kim/.cache/gpuctl-tests"
    assert environment.of({**seen, "HOME": str(tmp_path)})[environment.CACHE] == seen[environment.CACHE]


def test_a_test_sees_none_of_it() -> None:
    assert os.environ["TERM"] == "dumb" and Path(os.environ["HOME"]) != environment.cache().parents[1]


@pytest.mark.parametrize(
    "how", [("nohup",), ("sh", "-c", "trap '' INT QUIT HUP; exec \"$@\" <&-", "sh")], ids=["nohup", "in the background"]
)
def test_what_the_tests_start_can_be_signalled_however_they_were_started(how: Sequence[str]) -> None:
    command = [*how, sys.executable, "-c", _SHOW]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.splitlines() == ["True True", "True", "/dev/null", "0o22"]
