"""Sources of our own beside those of the image, with the machine's real apt: what it refuses, it refuses for good."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpuctl.bootstrap.boot.packages import Packages
from tests.fakes.bare_machine import BareMachine

APT = shutil.which("apt-get", path=os.defpath)
pytestmark = pytest.mark.skipif(not APT, reason="needs apt, for which conflicting sources are an error")

_PACKAGE = """Package: {0}
Version: 1.0
Architecture: all
Maintainer: nobody
Description: none
Filename: ./{0}.deb
Size: 1
SHA256: {1}
"""
_CONFIG = """Dir "{0}";
Dir::State::status "{0}/var/lib/dpkg/status";
APT::Sandbox::User "";
Acquire::Languages "none";
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BareMachine:
    """Its apt is this machine's, with folders of its own; what it would install it only says."""
    made = BareMachine(tmp_path)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    for folder in (
        "etc/apt/sources.list.d",
        "var/lib/dpkg",
        "var/lib/apt/lists",
        "var/cache/apt/archives",
        "repository",
    ):
        (made.root / folder).mkdir(parents=True, exist_ok=True)
    (made.root / "var/lib/dpkg/status").touch()
    packages = "\n".join(_PACKAGE.format(name, 64 * "0") for name in ("nvidia-open", "mdadm"))
    (made.root / "repository/Packages").write_text(packages)
    (tmp_path / "apt.conf").write_text(_CONFIG.format(made.root))
    made.program("apt-get", f'case "$*" in *update) exec {APT} "$@";; *) exec {APT} -s "$@";; esac')
    return made


def image_knows(machine: BareMachine, url: str) -> None:
    """As Azure's image does, which has NVIDIA's repository with a key of its own."""
    keyring = machine.root / "usr/share/keyrings/cuda-archive-keyring.gpg"
    keyring.parent.mkdir(parents=True)
    keyring.touch()
    line = f"deb [trusted=yes signed-by={keyring}] {url} ./\n"
    (machine.root / "etc/apt/sources.list.d/cuda.list").write_text(line)


def repository(machine: BareMachine) -> str:
    return f"file:{machine.root}/repository/"


def test_a_source_that_the_image_has_is_not_added_with_another_key(machine: BareMachine) -> None:
    image_knows(machine, repository(machine))
    packages = Packages(machine.root, {})
    packages.install_from("driver", "http://127.0.0.1:9/key", repository(machine), "./", "nvidia-open")
    packages.install("mdadm")
    assert not (machine.root / "etc/apt/sources.list.d/gpuctl.list").exists()


def test_a_source_that_apt_refuses_is_taken_out_again(machine: BareMachine, tmp_path: Path) -> None:
    """All others would be refused with it, for ever."""
    image_knows(machine, repository(machine))
    (tmp_path / "other.asc").touch()
    line = f"deb [trusted=yes signed-by={tmp_path}/other.asc] {repository(machine)} ./"
    packages = Packages(machine.root, {"driver": line})
    with pytest.raises(OSError, match="list of sources could not be read"):
        packages.install_from("driver", "", "", "", "nvidia-open")
    packages.install("mdadm")


def test_a_new_source_is_signed_by_the_key_that_was_fetched(machine: BareMachine, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"the key")
    packages = Packages(machine.root, {})
    with pytest.raises(OSError):  # it signs nothing
        packages.install_from("driver", (tmp_path / "key").as_uri(), repository(machine), "./", "nvidia-open")
    assert (machine.root / "etc/apt/keyrings/gpuctl-driver.asc").read_bytes() == b"the key"


def test_needrestart_is_told_to_restart_nothing(machine: BareMachine, tmp_path: Path) -> None:
    """It may be boot that it restarts, in the middle of a step (BOOT-REVIEW D13)."""
    told = tmp_path / "told"
    for name in ("apt-get", "dpkg"):
        machine.program(name, f'echo "$NEEDRESTART_MODE $DEBIAN_FRONTEND" >> {told}')
    Packages(machine.root, {}).install("mdadm")
    assert set(told.read_text().splitlines()) == {"l noninteractive"}
