"""For want of what a run fails where everything is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import promised
from tests.paths import ROOT
from tests.waiting import PATIENCE_S


def test_programs_and_packages_are_those_of_install_system() -> None:
    assert promised.programs()["sshd"] == "openssh-server"
    assert {"podman", "runc", "node", "systemd-nspawn"} <= promised.programs().keys()


@pytest.mark.parametrize(
    ("reason", "missing"),
    [
        ("no tmux here: apt-get install tmux", ["tmux"]),
        ("an older image is made by root with mmdebstrap (.ci/install-system)", ["mmdebstrap"]),
        ("network namespaces need root, iproute2 and util-linux", []),
        ('podman runs nothing here: Error: default OCI runtime "runc" not found: invalid argument', ["runc"]),
        ("Azurite is not installed; .ci/install-system installs it", ["Azurite"]),
        ("torch finds no NVIDIA GPU here", []),
    ],
)
def test_a_program_is_lacking_if_a_reason_names_it_and_it_is_not_there(
    tmp_path: Path, reason: str, missing: list[str]
) -> None:
    for program in ("ip", "podman"):
        (tmp_path / program).touch(mode=0o755)
    assert promised.lacking([reason], str(tmp_path)) == missing


@pytest.mark.parametrize(("ci", "code"), [("true", promised.LEFT_OUT), ("", 0)])
def test_a_run_fails_that_lacks_one_only_where_all_are_promised(tmp_path: Path, ci: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\ndef test_some():\n    pytest.skip('Azurite is not installed')\n"
    )
    env = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stdout
    assert "left out    1: Azurite is not installed" in done.stdout
    assert "for want of Azurite: `sudo .ci/install-system` adds that" in done.stdout
