"""NVIDIA's container toolkit and driver as their own sources have them, beside what the boot's steps ask of them: no
index that tests use has their packages.

Sources: NVIDIA/nvidia-container-toolkit d34b304 (1.20.0), pkg/config/engine/docker/docker.go and its test,
cmd/nvidia-ctk, packaging/debian/control; Azure/azhpc-images 8e9d055, components/install_nvidiagpudriver.sh and
install_nvidia_fabric_manager.sh.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.boot.install import Installation
from gpuctl.bootstrap.boot.metadata import Instance
from gpuctl.bootstrap.boot.store import open_store
from tests.bootstrap.boot.test_install import installed, with_switches, without_driver
from tests.fakes.bare_machine import NODE, BareMachine

OPTIONS = {
    "runtime configure": """
        dry-run runtime config drop-in-config executable-path config-mode config-source oci-hook-path
        nvidia-runtime-name nvidia-runtime-path runtime-path nvidia-runtime-hook-path nvidia-set-as-default
        set-as-default cdi.enabled cdi.enable enable-cdi""",
    "system create-device-nodes": "root driver-root dev-root control-devices load-kernel-modules dry-run",
    "cdi generate": """
        config-search-path output format mode discovery-mode dev-root device-name-strategy driver-root
        library-search-path nvidia-cdi-hook-path nvidia-ctk-path ldconfig-path vendor cdi-vendor class cdi-class
        csv.file csv.ignore-pattern csv.compat-container-root disable-hook disable-hooks enable-hook enable-hooks
        feature-flag feature-flags no-all-device device-id device-ids device devices""",
}
"""Of nvidia-ctk, by its commands."""
RUNTIMES = ("containerd", "crio", "docker")
"""That ``runtime configure`` takes."""
PACKAGES = {
    "nvidia-container-toolkit": ("nvidia-container-toolkit-base", "libnvidia-container-tools"),
    "nvidia-container-toolkit-base": (),
}
"""By name: what each depends on. The latter brings nvidia-ctk and nvidia-container-runtime."""
NVIDIA = {"path": "nvidia-container-runtime", "args": list[str]()}
OTHERS = {"not-nvidia": {"path": "some-other-path", "args": list[str]()}}
LOGS = {"log-driver": "json-file", "log-opts": {"max-size": "100m"}, "storage-driver": "overlay2"}
CONFIGURED: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "no file": (None, {"runtimes": {"nvidia": NVIDIA}}),
    "another runtime": ({"runtimes": OTHERS}, {"runtimes": {**OTHERS, "nvidia": NVIDIA}}),
    "its own by another path": ({"runtimes": {"nvidia": {"path": "x"}}}, {"runtimes": {"nvidia": NVIDIA}}),
    "settings": (LOGS, {**LOGS, "runtimes": {"nvidia": NVIDIA}}),
    "a default": ({"default-runtime": "X"}, {"default-runtime": "X", "runtimes": {"nvidia": NVIDIA}}),
    "systemd's cgroups": (
        {"exec-opts": ["native.cgroupdriver=systemd"], **LOGS},
        {"exec-opts": ["native.cgroupdriver=systemd"], **LOGS, "runtimes": {"nvidia": NVIDIA}},
    ),
}
"""Docker's daemon.json before ``nvidia-ctk runtime configure --runtime=docker`` and after it."""
CGROUPS = {"exec-opts": ["native.cgroupdriver=cgroupfs"]}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BareMachine:
    sources = dict.fromkeys(("driver", "toolkit"), "deb [trusted=yes] http://10.0.0.1/nvidia ./")
    made = BareMachine(tmp_path, sources=sources)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def machine(bare: BareMachine) -> Installation:
    here = Instance(NODE, "10.0.0.7", "", "us-east-1a", "us-east-1", "p4d.24xlarge")
    return Installation(bare.root, bare.plain_spec, NODE, here, open_store(bare.spec.bucket, {}, None))


@pytest.mark.parametrize("case", CONFIGURED)
def test_docker_has_nvidias_runtime_its_own_settings_and_its_own_cgroups(
    case: str, bare: BareMachine, machine: Installation, tmp_path: Path
) -> None:
    before, written = CONFIGURED[case]
    settings = bare.root / "etc/docker/daemon.json"
    if before is not None:
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps(before))
    # As Go's MarshalIndent does it, with no end of line; it makes the folder.
    (tmp_path / "written").write_text(json.dumps(written, indent=4, sort_keys=True))
    copy = f"mkdir -p {settings.parent}; cat {tmp_path}/written > {settings}"
    bare.program("nvidia-ctk", f'case "$1 $2" in "runtime configure") {copy};; esac')
    seen = f"cat {settings} > {tmp_path}/read"
    bare.program("systemctl", f'case "$*" in "restart docker") {seen};; esac')
    machine.toolkit()
    assert json.loads((tmp_path / "read").read_text()) == {**written, **CGROUPS}, "as Docker reads it when it starts"
    assert json.loads(settings.read_text()) == {**written, **CGROUPS}


def test_what_nvidias_program_is_asked_is_what_it_knows(bare: BareMachine, machine: Installation) -> None:
    machine.toolkit()
    machine.cdi()
    calls = [shlex.split(call)[1:] for call in bare.calls("nvidia-ctk")]
    assert {" ".join(call[:2]) for call in calls} == set(OPTIONS)
    for call in calls:
        known = OPTIONS[" ".join(call[:2])].split()
        for word in call[2:]:
            found = re.fullmatch(r"--([\w.-]+)(=.+)?", word)
            assert found and found[1] in known, call
            assert found[1] != "runtime" or found[2] in {f"={name}" for name in RUNTIMES}


def test_the_package_that_is_installed_brings_the_program_that_was_missing(
    bare: BareMachine, machine: Installation
) -> None:
    bare.without("nvidia-ctk")
    machine.toolkit()
    (name,) = installed(bare)
    assert "nvidia-container-toolkit-base" in (name, *PACKAGES[name]), "recommendations are not installed"


@pytest.mark.parametrize(
    ("version", "manager"),
    [
        ("595.91.01", "nvidia-fabricmanager"),
        ("580.65.06", "nvidia-fabricmanager"),
        ("575.57.08", "nvidia-fabricmanager-575"),
        ("550.163.01", "nvidia-fabricmanager-550"),
    ],
)
def test_driver_and_fabric_manager_have_the_names_by_which_azures_images_install_them(
    version: str, manager: str, bare: BareMachine, machine: Installation
) -> None:
    without_driver(bare)
    bare.program("modinfo", f'[ -e "$CALLS.loaded" ] || exit 1; echo {version}')
    with_switches(bare)
    machine.driver()
    assert installed(bare) == [f"linux-headers-{os.uname().release} nvidia-open", f"{manager}={version}*"]
