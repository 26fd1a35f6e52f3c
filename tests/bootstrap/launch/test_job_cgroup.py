"""The cgroup of a round, on the kernel's own hierarchy where the tests may write there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.launch.job_cgroup import SERVICE, delegated, end, end_all, make

_CGROUPS = Path("/sys/fs/cgroup")

# A daemon with an environment and a session of its own, whose parent has ended.
_STARTS = """
import os, sys
from gpuctl.trainers.launchers.descendants import enter
enter(sys.argv[1])
for below in sys.argv[2:]:
    os.mkdir(below)
    enter(below)
os.system("env -i setsid sh -c 'sleep 1000 >/dev/null & echo $!'")
"""


@pytest.fixture
def base() -> Iterator[Path]:
    for top in (_CGROUPS / "systemd", _CGROUPS / "unified", _CGROUPS):
        folder = top / f"gpuctl-test-{os.getpid()}" / SERVICE
        try:
            folder.mkdir(parents=True)
        except OSError:
            continue
        if not (folder / "cgroup.procs").exists():
            continue
        yield folder
        folder.rmdir()
        folder.parent.rmdir()
        return
    pytest.skip("no cgroup may be made here")


def stray(cgroup: str, *below: str) -> psutil.Process:
    command = [sys.executable, "-c", _STARTS, cgroup, *below]
    return psutil.Process(int(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60).stdout))


@pytest.mark.slow
def test_nothing_in_it_outlives_it_and_what_is_beside_it_does(base: Path) -> None:
    ours, other = make("train-1", 1, base), make("train-1", 12, base)
    strays, spared = [stray(ours), stray(ours, f"{ours}/of-the-jobs-own")], stray(other)
    assert end(ours) == []
    assert psutil.wait_procs(strays, 10)[1] == []
    assert not Path(ours).exists() and spared.is_running()
    assert end_all(base) == []
    assert psutil.wait_procs([spared], 10)[1] == []
    assert [path for path in base.iterdir() if path.is_dir()] == []


def test_one_that_lives_on_is_told_and_keeps_its_cgroup(tmp_path: Path) -> None:
    """As one that hangs in a driver does. Where the kernel has ``cgroup.kill``, that is used."""
    cgroup = Path(make("train-1", 1, tmp_path))
    (cgroup / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert end(str(cgroup), patience_s=0.05) == [os.getpid()]
    assert (cgroup / "cgroup.kill").read_text() == "1"


@pytest.mark.parametrize(
    ("own", "mounted", "found"),
    [
        (f"0::/system.slice/{SERVICE}", "", True),
        (f"1:name=systemd:/system.slice/{SERVICE}\n0::/system.slice/{SERVICE}", "unified", True),
        (f"4:memory:/x\n1:name=systemd:/system.slice/{SERVICE}", "systemd", True),
        (f"4:memory:/x\n1:name=systemd:/system.slice/{SERVICE}", "", False),  # and none of it can be reached
        ("0::/user.slice/user-1000.slice/session-2.scope", "", False),
        ("0::/", "", False),
    ],
    ids=["v2", "hybrid", "v1", "hidden", "login", "top"],
)
def test_only_the_agents_own_service_is_divided(tmp_path: Path, own: str, mounted: str, found: bool) -> None:
    told = tmp_path / "told"
    told.write_text(f"{own}\n")
    top = tmp_path / "top"
    for place in (f"system.slice/{SERVICE}", "user.slice/user-1000.slice/session-2.scope", ""):
        (top / mounted / place).mkdir(parents=True, exist_ok=True)
        (top / mounted / place / "cgroup.procs").touch()
    assert delegated(told, top) == (top / mounted / "system.slice" / SERVICE if found else None)


def test_without_one_all_goes_on(tmp_path: Path) -> None:
    assert delegated(tmp_path / "missing", tmp_path) is None
    assert make("train-1", 1, None) == make("train-1", 1, tmp_path / "missing") == ""
    assert end("") == end_all(None) == []
