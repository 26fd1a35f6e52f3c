"""The steps towards a node, one by one: what they ask of apt, systemd, NVIDIA's programs and pip."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.boot.idle import BOOT_S
from gpuctl.bootstrap.boot.install import Installation
from gpuctl.bootstrap.boot.metadata import Instance
from gpuctl.bootstrap.boot.store import open_store
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.bootstrap.network.nccl_env import CUDART
from gpuctl.bootstrap.node_spec import Promise
from tests.fakes.bare_machine import NODE, PINS, BareMachine
from tests.waiting import until

HERE = Instance(NODE, "10.0.0.7", "", "us-east-1a", "us-east-1", "p4d.24xlarge")
UPDATE = "apt-get -q -y -o DPkg::Lock::Timeout=600 update"
INSTALL = "apt-get -q -y -o DPkg::Lock::Timeout=600 --no-install-recommends install"

Make = Callable[..., tuple[BareMachine, Installation]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A bare machine, and its steps, which run in this process."""

    def made(**changes: Any) -> tuple[BareMachine, Installation]:
        bare = BareMachine(tmp_path, **changes)
        for name, value in bare.env.items():
            monkeypatch.setenv(name, value)
        store = open_store(bare.spec.bucket, {}, None)
        return bare, Installation(bare.root, bare.plain_spec, NODE, HERE, store, heartbeat_within_s=0.2)

    return made


def names(machine: Installation) -> list[str]:
    return [step.name for step in machine.steps()]


def test_a_boot_whose_long_steps_take_their_time_is_not_taken_for_one_that_hangs(make: Make) -> None:
    """A driver that is built from source, and torch from a slow mirror."""
    limits = {step.name: step.limit_s for step in make()[1].steps()}
    assert limits["driver"] + limits["gpuctl"] + limits["docker"] <= BOOT_S


def test_upgrades_are_held_first_and_the_gate_comes_before_what_a_bad_machine_does_not_need(make: Make) -> None:
    _, machine = make()
    assert names(machine) == [
        *("hold", "driver", "fabric", "persistence", "gate"),
        *("scratch", "docker", "toolkit", "storage", "cdi", "compiler", "gpuctl", "identity", "agent"),
    ]


def test_on_a_machine_that_was_there_before_nothing_is_touched_but_gpuctl(make: Make) -> None:
    _, machine = make(provider="ssh")
    assert names(machine) == ["gate", "gpuctl", "identity", "agent"]


# -- the image -----------------------------------------------------------------------------------------------------


def test_no_upgrade_comes_and_the_installed_driver_stays(make: Make) -> None:
    bare, machine = make()
    machine.hold()
    units = "apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service"
    assert bare.calls("systemctl") == [f"systemctl mask {units}", f"systemctl stop {units}"]
    assert bare.calls("apt-mark") == ["apt-mark hold nvidia-driver-580 libnvidia-compute-580"]


_UPGRADE = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    input()
"""


def test_it_waits_for_whoever_holds_dpkgs_lock(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    bare, machine = make()
    lock = bare.root / "var/lib/dpkg/lock-frontend"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", _UPGRADE, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as upgrade:
        assert upgrade.stdout is not None
        assert upgrade.stdout.readline() == "held\n"
        step = threading.Thread(target=machine.packages.install, args=("docker.io",))
        step.start()
        until(lambda: f" {os.getpid()} " in _waiting_at(lock), "the step at the lock")
        assert bare.calls() == []
        upgrade.communicate("\n", timeout=60)
    step.join(timeout=60)
    assert bare.calls()[-1] == f"{INSTALL} docker.io"
    assert f"waiting for {lock}" in capfd.readouterr().out


def _waiting_at(lock: Path) -> str:
    inode = f":{lock.stat().st_ino} "
    return "".join(line for line in Path("/proc/locks").read_text().splitlines() if "->" in line and inode in line)


def test_an_image_that_has_all_of_it_needs_no_package(make: Make) -> None:
    bare, machine = make()
    for step in (machine.driver, machine.docker, machine.fabric, machine.compiler):
        step()
    assert bare.calls() == ["modinfo --field version nvidia", "modprobe nvidia"]


def test_a_machine_without_gpus_gets_no_driver_and_no_toolkit(make: Make) -> None:
    bare, machine = make(promise=Promise())
    bare.without("gcc")
    for step in (machine.driver, machine.toolkit, machine.cdi, machine.fabric, machine.compiler):
        step()
    assert bare.calls() == []


def test_gpus_are_kept_awake_whatever_the_daemons_unit_says(make: Make) -> None:
    bare, machine = make()
    (step,) = [step for step in machine.steps() if step.name == "persistence"]
    assert step.always, "it does not outlive a boot"
    step.do()
    assert bare.calls() == ["systemctl start nvidia-persistenced.service", "nvidia-smi -pm 1"]


@pytest.mark.parametrize("missing", ["systemctl", "nvidia-smi"])
def test_what_does_not_keep_gpus_awake_is_said_and_stops_nothing(
    make: Make, missing: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bare, machine = make()
    bare.program(missing, "echo no such thing; exit 5")
    machine.persistence()
    assert bare.calls()[-1] == "nvidia-smi -pm 1"
    said = capfd.readouterr().out
    assert "no such thing" in said
    assert ("GPUs are not kept awake" in said) == (missing == "nvidia-smi")


def test_without_gpus_none_is_kept_awake(make: Make) -> None:
    bare, machine = make(promise=Promise())
    machine.persistence()
    assert bare.calls() == []


def without_driver(bare: BareMachine) -> None:
    bare.program("modinfo", '[ -e "$CALLS.loaded" ] || { echo "no driver"; exit 1; }; echo 580.95.05')
    bare.program("modprobe", 'touch "$CALLS.loaded"')


def with_switches(bare: BareMachine) -> None:
    """As a p4d has them, beside a GPU."""
    for name, kind in (("0000:00:1c.0", "0x030200"), ("0000:00:1d.0", "0x068000")):
        device = bare.root / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(f"{kind}\n")


def installed(bare: BareMachine) -> list[str]:
    return [call.removeprefix(f"{INSTALL} ") for call in bare.calls(INSTALL)]


def test_a_missing_driver_is_installed_from_the_named_repository_loaded_and_held(make: Make) -> None:
    line = "deb [trusted=yes] http://10.0.0.1/cuda ./"
    bare, machine = make(sources={"driver": line})
    without_driver(bare)
    machine.driver()
    assert [call for call in bare.calls() if not call.startswith("dpkg-query")] == [
        "modinfo --field version nvidia",
        "dpkg --configure -a",
        UPDATE,
        f"{INSTALL} linux-headers-{os.uname().release} nvidia-open",
        "apt-mark hold nvidia-driver-580 libnvidia-compute-580",
        "modprobe nvidia",
    ]
    assert (bare.root / "etc/apt/sources.list.d/gpuctl.list").read_text() == f"{line}\n"


@pytest.mark.parametrize("loaded", [True, False])
def test_a_driver_that_is_there_is_left_alone_though_nvidia_smi_fails(make: Make, loaded: bool) -> None:
    """One GPU off the bus: another driver on top of the image's makes it worse, and the gate names the GPU."""
    bare, machine = make()
    bare.program("nvidia-smi", "echo Unable to determine the device handle; exit 15")
    if loaded:
        (bare.root / "proc/driver/nvidia").mkdir(parents=True)
        (bare.root / "proc/driver/nvidia/version").touch()
    machine.driver()
    assert bare.calls("apt") == []
    assert not (bare.root / "etc/apt/sources.list.d/gpuctl.list").exists()


def test_switches_between_gpus_get_the_fabric_manager_of_the_drivers_version(make: Make) -> None:
    bare, machine = make(sources={"driver": "deb [trusted=yes] http://10.0.0.1/cuda ./"})
    without_driver(bare)
    with_switches(bare)
    machine.driver()
    assert installed(bare) == [f"linux-headers-{os.uname().release} nvidia-open", "nvidia-fabricmanager=580.95.05*"]
    assert bare.calls("systemctl") == ["systemctl enable --now nvidia-fabricmanager.service"]


def test_an_older_drivers_manager_has_its_branch_in_its_name(make: Make) -> None:
    bare, machine = make(sources={"driver": "deb [trusted=yes] http://10.0.0.1/cuda ./"})
    bare.program("modinfo", "echo 570.124.06")
    with_switches(bare)
    machine.driver()
    assert installed(bare) == ["nvidia-fabricmanager-570=570.124.06*"]


def test_a_fabric_manager_that_is_there_is_only_started(make: Make) -> None:
    bare, machine = make()
    bare.program("nv-fabricmanager", "")
    with_switches(bare)
    machine.driver()
    assert bare.calls("apt") == []
    assert bare.calls("systemctl") == ["systemctl enable --now nvidia-fabricmanager.service"]


def test_torch_compile_gets_its_compiler_and_headers(make: Make) -> None:
    bare, machine = make()
    bare.without("gcc")
    machine.compiler()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert installed(bare) == [f"gcc libc6-dev python{version}-dev"]
    bare.program("gcc", "")
    (bare.root / f"usr/include/python{version}/Python.h").unlink()
    machine.compiler()
    assert len(installed(bare)) == 2, "without its headers the compiler is of no use"


def test_a_list_that_cannot_be_updated_stops_no_package(make: Make) -> None:
    """A third party's mirror that is being synchronized, beside a distribution that has what is wanted."""
    bare, machine = make()
    away = 'echo "E: Some index files failed to download"; exit 100'
    bare.program("apt-get", f'case "$*" in *update) {away};; *) ln -s dpkg "$PROGRAMS/docker";; esac')
    bare.without("docker")
    machine.docker()
    assert installed(bare) == ["docker.io"]


def test_where_dockers_client_is_a_package_of_its_own_it_comes_too(make: Make) -> None:
    bare, machine = make()
    bare.program("apt-get", 'case "$*" in *docker-cli) ln -s dpkg "$PROGRAMS/docker";; esac')
    bare.without("docker")
    machine.docker()
    assert installed(bare) == ["docker.io", "docker-cli"]


def test_no_snap_is_refreshed_while_jobs_run(make: Make) -> None:
    bare, machine = make()
    bare.program("snap", "")
    machine.hold()
    assert bare.calls("snap") == ["snap refresh --hold"]


def test_docker_keeps_its_own_settings_and_the_cgroups_of_its_containers(make: Make) -> None:
    bare, machine = make()
    settings = bare.root / "etc/docker/daemon.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}')
    machine.toolkit()
    told = json.loads(settings.read_text())
    assert told["exec-opts"] == ["native.cgroupdriver=cgroupfs"]
    assert told["runtimes"]["nvidia"]["path"] == "nvidia-container-runtime"


def test_the_usual_repository_is_signed_by_its_key(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare, machine = make()
    bare.without("nvidia-ctk")
    (tmp_path / "gpgkey").write_bytes(b"the key")
    monkeypatch.setattr("gpuctl.bootstrap.boot.install._TOOLKIT", tmp_path.as_uri())
    machine.toolkit()
    key = bare.root / "etc/apt/keyrings/gpuctl-toolkit.asc"
    assert key.read_bytes() == b"the key"
    line = f"deb [signed-by={key}] {tmp_path.as_uri()}/stable/deb/$(ARCH) /\n"
    assert (bare.root / "etc/apt/sources.list.d/gpuctl.list").read_text() == line
    assert f"{INSTALL} nvidia-container-toolkit" in bare.calls()


def test_a_closed_networks_repository_is_all_that_apt_is_shown(make: Make) -> None:
    line = "deb [trusted=yes] http://10.0.0.1/apt ./"
    bare, machine = make(sources={"apt": line})
    bare.without("docker")
    machine.docker()
    machine.packages.install("something")
    ours = bare.root / "etc/apt/sources.list.d/gpuctl.list"
    assert ours.read_text() == f"{line}\n"
    shown = f"-o Dir::Etc::sourcelist={ours} -o Dir::Etc::sourceparts=-"
    assert bare.calls("apt-get")[0] == f"apt-get -q -y -o DPkg::Lock::Timeout=600 {shown} update"


def test_podman_is_as_good_as_docker(make: Make) -> None:
    bare, machine = make()
    bare.without("docker")
    bare.program("podman", "")
    machine.docker()
    machine.toolkit()
    assert bare.calls("apt-get") == []
    assert bare.calls("nvidia-ctk") == []


def test_the_list_of_devices_is_made_at_every_boot_and_after_the_control_devices(make: Make) -> None:
    """By an older toolkit without those."""
    bare, machine = make()
    bare.program("nvidia-ctk", 'case "$1" in system) exit 3;; esac')
    (step,) = [step for step in machine.steps() if step.name == "cdi"]
    assert step.always, "another driver has other files"
    step.do()
    assert bare.calls("nvidia-ctk") == [
        "nvidia-ctk system create-device-nodes --control-devices --load-kernel-modules",
        f"nvidia-ctk cdi generate --output={bare.root}/etc/cdi/nvidia.yaml",
    ]


def test_systemd_is_reloaded_before_docker_starts_anew_and_never_again(make: Make) -> None:
    bare, machine = make()
    bare.program("python", "")
    venv = bare.root / "opt/gpuctl/venv/bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(bare.programs / "python")
    for step in machine.steps():
        step.do()
    units = bare.calls("systemctl")
    assert [call for call in units if "reload" in call] == ["systemctl daemon-reload"]
    order = [
        units.index(f"systemctl {what}") for what in ("daemon-reload", "restart docker", "start gpuctl-agent.service")
    ]
    assert order == sorted(order)


def test_efa_comes_from_its_installer(make: Make, tmp_path: Path) -> None:
    packed = tmp_path / "efa.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        script = b'#!/bin/bash\necho "efa_installer $PWD $*" >> "$CALLS"\n'
        entry = tarfile.TarInfo("aws-efa-installer/efa_installer.sh")
        entry.size = len(script)
        tar.addfile(entry, io.BytesIO(script))
    bare, machine = make(sources={"efa": packed.as_uri()})
    bare.without("fi_info")
    machine.fabric()
    assert bare.calls() == [f"efa_installer {bare.root}/opt/gpuctl/efa/aws-efa-installer -y"]
    assert "memlock unlimited" in (bare.root / "etc/security/limits.d/99-gpuctl.conf").read_text()


def test_infiniband_gets_its_programs_and_modules(make: Make) -> None:
    bare, machine = make(promise=Promise(gpus=8, fabric="infiniband", fabric_cards=8))
    machine.fabric()
    assert f"{INSTALL} rdma-core ibverbs-utils ibverbs-providers" in bare.calls()
    assert bare.calls("modprobe") == [f"modprobe {name}" for name in ("mlx5_ib", "ib_umad", "rdma_ucm")]
    assert "memlock unlimited" in (bare.root / "etc/security/limits.d/99-gpuctl.conf").read_text()


# -- gpuctl --------------------------------------------------------------------------------------------------------


def with_venv(bare: BareMachine, body: str = "") -> Path:
    """A virtual environment whose python is a stand-in, as an image may bring one."""
    bare.program("venv-python", body)
    folder = bare.root / "opt/gpuctl/venv/bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(bare.programs / "venv-python")
    return folder.parent


def test_gpuctl_is_installed_with_its_pins_and_extras_into_the_images_environment(make: Make) -> None:
    bare, machine = make()
    with_venv(bare, 'echo "index: $PIP_NO_INDEX" >> "$CALLS"')
    machine.gpuctl()
    folder = bare.root / "opt/gpuctl"
    assert bare.calls("python") == [
        "python -m pip --disable-pip-version-check --no-cache-dir install --progress-bar=off "
        f"-c {folder}/constraints.txt gpuctl[train] @ file://{folder}/gpuctl-0.1.0-py3-none-any.whl"
    ]
    assert bare.calls()[-1] == "index: 1"
    assert (folder / "constraints.txt").read_bytes() == PINS
    assert not (folder / "venv.unfinished").exists()


def test_torchs_cuda_runtime_gets_the_name_that_efas_plug_in_opens(make: Make) -> None:
    bare, machine = make()
    runtime = with_venv(bare) / "lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13"
    link = bare.root / CUDART.lstrip("/")
    machine.gpuctl()
    assert not link.is_symlink(), "torch for CPUs has none"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    for _ in range(2):
        machine.gpuctl()
        assert link.resolve() == runtime.resolve()


def test_another_gpuctl_is_taken_out_first_since_its_version_may_be_the_same(make: Make) -> None:
    bare, machine = make()
    venv = with_venv(bare)
    (venv / "lib/python3.12/site-packages/gpuctl").mkdir(parents=True)
    machine.gpuctl()
    assert [call.split()[5] for call in bare.calls("python")] == ["uninstall", "install"]
    assert bare.calls("systemctl") == ["systemctl stop gpuctl-agent.service"]


@pytest.mark.parametrize("file", ["wheel", "constraints"])
def test_a_package_that_was_tampered_with_is_not_installed(make: Make, file: str) -> None:
    bare, machine = make()
    with_venv(bare)
    (bare.bucket / getattr(bare.spec.package, file)).write_bytes(b"something else")
    with pytest.raises(OSError, match="has the digest"):
        machine.gpuctl()
    assert bare.calls("python") == []


def test_a_new_version_is_another_mark(make: Make) -> None:
    _, machine = make()
    (step,) = [step for step in machine.steps() if step.name == "gpuctl"]
    other = {**machine.spec, "package": {**machine.spec["package"], "sha256": hashlib.sha256(b"2").hexdigest()}}
    (next_step,) = [step for step in replace(machine, spec=other).steps() if step.name == "gpuctl"]
    assert step.mark != next_step.mark


# -- identity and agent --------------------------------------------------------------------------------------------


def test_the_identity_has_the_networks_variables_and_the_specs_go_before(make: Make) -> None:
    bare, machine = make(env={"NCCL_DEBUG": "WARN", "A": 'with "quotes" and ü'})
    with_venv(bare, """echo '{"NCCL_SOCKET_IFNAME": "ens5", "NCCL_DEBUG": "INFO"}'; echo noise >&2""")
    machine.identity()
    assert bare.calls() == ["python -m gpuctl.bootstrap.network.inventory --env --type p4d.24xlarge --address 10.0.0.7"]
    path = bare.root / "var/lib/gpuctl/node/identity.json"
    assert json.loads(path.read_text()) == {
        "node": NODE,
        "provider": "aws",
        "address": "10.0.0.7",
        "bucket": bare.spec.bucket,
        "notice_s": 30.0,
        "promised_s": 30.0,
        "env": {"NCCL_SOCKET_IFNAME": "ens5", "NCCL_DEBUG": "WARN", "A": 'with "quotes" and ü'},
    }
    env = bare.root / "var/lib/gpuctl/agent.env"
    assert env.read_text() == 'NCCL_DEBUG="WARN"\nA="with \\"quotes\\" and ü"\n'
    assert {file.stat().st_mode & 0o777 for file in (path, env)} == {0o600}


def test_the_agent_is_told_how_long_a_shutdown_and_a_notice_last(make: Make) -> None:
    bare, machine = make()
    with_venv(bare)
    replace(machine, spec={**machine.spec, "shutdown_s": 140.0, "notice_s": 120.0}).identity()
    told = NodeIdentity.read(bare.root / "var/lib/gpuctl/node")
    assert (told.notice_s, told.promised_s) == (140, 120)


@pytest.mark.parametrize("said", ["exit 1", "echo nonsense", ""])
def test_a_network_that_cannot_be_looked_at_is_no_reason_not_to_start(make: Make, said: str) -> None:
    bare, machine = make()
    with_venv(bare, said)
    machine.identity()
    told = json.loads((bare.root / "var/lib/gpuctl/node/identity.json").read_text())
    assert told["env"] == {"PIP_NO_INDEX": "1"}


def test_an_identity_is_replaced_at_the_next_boot(make: Make) -> None:
    bare, machine = make()
    with_venv(bare)
    path = bare.root / "var/lib/gpuctl/node/identity.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    path.with_suffix(".partial").write_text("broken off")
    machine.identity()
    assert json.loads(path.read_text())["node"] == NODE
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_agent_that_sends_a_heartbeat_has_started(make: Make) -> None:
    bare, machine = make()
    machine.agent()
    machine.agent()  # another beat
    assert bare.calls("systemctl") == ["systemctl start gpuctl-agent.service"] * 2


def test_an_agent_that_is_not_heard_of_has_not_and_its_last_words_are_the_reason(make: Make) -> None:
    bare, machine = make()
    bare.program("systemctl", "")
    with pytest.raises(OSError, match="sends no heartbeat: error: there is no cluster"):
        machine.agent()


@pytest.mark.slow
def test_that_the_bucket_is_away_is_not_the_agents_fault(make: Make) -> None:
    bare, machine = make()
    away = open_store("gs://b/p?base_url=http://127.0.0.1:9&bearer_token=t", {}, None)
    replace(machine, store=away, heartbeat_within_s=0.0).agent()
    assert bare.calls("systemctl") == ["systemctl start gpuctl-agent.service"]


@pytest.mark.parametrize(
    ("oldest", "packages", "python"),
    [((4, 0), "python3.11 python3.11-venv", "python3.11"), ((3, 10), "python3 python3-venv", "python3")],
)
def test_a_python_that_is_too_old_or_makes_no_environments_is_helped(
    make: Make, monkeypatch: pytest.MonkeyPatch, oldest: tuple[int, int], packages: str, python: str
) -> None:
    bare, machine = make()
    bare.program("bare-python", "exit 1")  # import ensurepip
    bare.program(python, "exit 3")
    monkeypatch.setattr("gpuctl.bootstrap.boot.install._OLDEST_PYTHON", oldest)
    monkeypatch.setattr(sys, "executable", str(bare.programs / "bare-python"))
    with pytest.raises(OSError, match=f"{python} -m venv --clear .* exited with 3"):
        machine.gpuctl()
    assert f"{INSTALL} {packages}" in bare.calls()
