"""The boot program from its first step to its last, as user-data starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.boot.__main__ import boot
from gpuctl.bootstrap.boot.metadata import Metadata
from gpuctl.bootstrap.node_spec import Promise
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import BootReport
from tests.bench.network import entering, is_possible, namespace
from tests.fakes.bare_machine import NODE, BareMachine, lose_power
from tests.fakes.metadata import Provider, Service
from tests.fakes.scripted_server import answering
from tests.waiting import until


@pytest.fixture
def service() -> Iterator[Service]:
    with Service("aws").running() as service:
        yield service


@pytest.fixture
def make(tmp_path: Path, service: Service) -> Callable[..., BareMachine]:
    """A bare machine whose image brings an environment, so that pip is a stand-in too."""

    def made(**changes: Any) -> BareMachine:
        machine = BareMachine(tmp_path, service.url, **changes)
        machine.program("venv-python", "")
        folder = machine.root / "opt/gpuctl/venv/bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(machine.programs / "venv-python")
        return machine

    return made


def test_a_bare_machine_becomes_a_node(tmp_path: Path, service: Service) -> None:
    machine = BareMachine(tmp_path, service.url)  # whose python makes the environment, and its pip installs gpuctl
    machine.boot()
    report = decode((machine.bucket / f"boot/{NODE}.json").read_bytes(), BootReport, "the report")
    assert (report.node, report.state, report.reason) == (NODE, "ready", ""), machine.log()
    assert (report.address, report.user, report.type) == ("127.0.0.1", "ubuntu", "p4d.24xlarge")
    assert report.host_keys == ("ssh-ed25519 AAAA",)
    assert machine.calls()[-1] == "systemctl start gpuctl-agent.service"
    told = json.loads((machine.root / "var/lib/gpuctl/node/identity.json").read_text())
    assert (told["node"], told["provider"], told["address"]) == (NODE, "aws", "127.0.0.1")
    installed = machine.root / "opt/gpuctl/venv/bin/python"
    assert subprocess.run([installed, "-c", "import gpuctl"], timeout=60, check=True)
    secret = [p.name for p in machine.root.rglob("*") if p.is_file() and p.stat().st_mode & 0o77 == 0]
    assert {"node.json", "identity.json", "agent.env"} <= set(secret)


def test_a_reboot_checks_and_starts_again_and_installs_nothing(make: Callable[..., BareMachine]) -> None:
    machine = make()
    machine.boot()
    before = len(machine.calls())
    machine.boot()
    again = [call.split()[0] for call in machine.calls()[before:]]
    asks = {"systemctl", "udevadm", "lsblk", "nvidia-smi", "nvidia-ctk", "fi_info", "python3", "python"}
    assert set(again) == asks
    assert "nvidia-smi -pm 1" in machine.calls()[before:]
    assert machine.calls("python")[-1].endswith("--env --type p4d.24xlarge --address 127.0.0.1")
    assert machine.report()["state"] == "ready"


def test_a_step_that_fails_twice_then_works_delays_a_node_and_no_more(make: Callable[..., BareMachine]) -> None:
    machine = make()
    cards = 'echo "    domain: a"; echo "    domain: b"'
    machine.program("fi_info", f'[ "$(grep -c ^fi_info "$CALLS")" -ge 3 ] || exit 61; {cards}')
    said = machine.boot()
    assert len(machine.calls("fi_info")) == 3
    assert "gate fi_info -p efa -t FI_EP_RDM exited with 61: it printed nothing" in said
    assert machine.report()["state"] == "ready"


def test_a_machine_that_fails_says_why_keeps_its_log_and_leaves(make: Callable[..., BareMachine]) -> None:
    with answering(200) as (url, seen):
        machine = make(sources={"autoscaling": url})
        machine.program("nvidia-smi", 'case "$*" in *ecc*) echo "0, 40960, 0";; esac')
        machine.boot()
    report = machine.report()
    assert (report["state"], report["step"], report["reason"]) == ("failed", "gate", "1 GPUs found, expected 2")
    assert "gate 1 GPUs found, expected 2 (" in machine.log()
    assert "+ systemctl mask" in machine.log()
    assert machine.log().endswith("leaving in 0 minutes; to keep the machine: sudo systemctl stop gpuctl-boot\n")
    asked = parse_qs(seen[0]["body"])
    assert asked["Action"] == ["TerminateInstanceInAutoScalingGroup"]
    assert asked["InstanceId"] == [NODE]
    claim = machine.root / "run/gpuctl/leaving"
    assert claim.read_text() == "boot failed: gate: 1 GPUs found, expected 2"
    assert machine.calls("systemctl start gpuctl-agent") == []


def test_a_machine_that_failed_waits_for_whoever_wants_to_look_at_it(make: Callable[..., BareMachine]) -> None:
    machine = make(unhealthy_minutes=10.0)
    machine.program("nvidia-smi", "exit 9")
    process = machine.start()
    try:
        until(lambda: (machine.bucket / f"boot/{NODE}.json").exists(), "a report")
        until(lambda: machine.report()["state"] == "failed", "the failure")
        assert process.poll() is None
        assert not (machine.root / "run/gpuctl/leaving").exists()
    finally:
        lose_power(process)


def test_a_machine_that_somebody_else_takes_away_already_is_not_taken_twice(make: Callable[..., BareMachine]) -> None:
    with answering() as (url, seen):
        machine = make(sources={"autoscaling": url})
        (machine.root / "run/gpuctl").mkdir(parents=True)
        (machine.root / "run/gpuctl/leaving").write_text("idle for 15 minutes")
        machine.program("nvidia-smi", "exit 9")
        machine.boot()
    assert seen == []
    assert (machine.root / "run/gpuctl/leaving").read_text() == "idle for 15 minutes"


@pytest.mark.parametrize(("provider", "api", "switched_off"), [("azure", "arm", 0), ("aws", "autoscaling", 3)])
def test_a_machine_that_failed_and_may_not_leave_tries_until_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: Provider, api: str, switched_off: int
) -> None:
    slept: list[float] = []
    with Service(provider).running() as service, answering(*[403] * 20, 200) as (url, seen):
        machine = BareMachine(tmp_path, service.url, provider=provider, sources={api: url})
        for name, value in machine.env.items():
            monkeypatch.setenv(name, value)
        machine.program("nvidia-smi", "exit 9")
        boot(machine.root, machine.plain_spec, Metadata(provider), slept.append)
    assert len(seen) == 21
    assert [pause for pause in slept if pause >= 60] == [60, 120, 240]
    assert machine.calls("systemctl poweroff") == ["systemctl poweroff"] * switched_off


def test_a_machine_goes_by_the_name_that_its_price_is_known_by(make: Callable[..., BareMachine]) -> None:
    """Google's metadata says ``n1-standard-8``, whatever GPUs are hung on it."""
    machine = make(type="n1-standard-8+t4x1")
    machine.boot()
    assert machine.report()["type"] == "n1-standard-8+t4x1"


def test_a_machine_of_ones_own_that_fails_stays(make: Callable[..., BareMachine]) -> None:
    machine = make(provider="ssh", node=NODE, address="127.0.0.1")
    machine.program("nvidia-smi", "exit 9")
    machine.boot()
    assert machine.report()["state"] == "failed"
    assert not (machine.root / "run/gpuctl/leaving").exists()
    assert machine.calls("apt") == []


def test_a_disk_that_takes_nothing_is_a_failure_that_is_told(make: Callable[..., BareMachine]) -> None:
    machine = make(provider="ssh", node=NODE)
    (machine.root / "var/log/gpuctl-boot.log").mkdir(parents=True)  # in the way of all that is logged
    machine.boot()
    report = machine.report()
    assert (report["state"], report["step"]) == ("failed", "boot")
    assert "gpuctl-boot.log" in report["reason"]


def test_a_bucket_that_comes_back_within_that_time_hears_why_it_failed(
    make: Callable[..., BareMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make(provider="ssh", node=NODE, unhealthy_minutes=10.0)
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    machine.program("nvidia-smi", "exit 9")
    obstacle = machine.bucket / f"boot/{NODE}.json.partial"
    obstacle.mkdir()

    def sleep(seconds: float) -> None:
        if seconds == 600:
            assert not (machine.bucket / f"boot/{NODE}.json").exists()
            obstacle.rmdir()

    boot(machine.root, machine.plain_spec, Metadata("ssh"), sleep)
    assert machine.report()["state"] == "failed"


def test_a_bucket_that_takes_no_reports_does_not_stop_the_boot(make: Callable[..., BareMachine]) -> None:
    machine = make()
    (machine.bucket / f"boot/{NODE}.json.partial").mkdir()  # in the way of every report, and of no wheel
    process = machine.start()
    try:
        until(lambda: machine.calls("systemctl start gpuctl-agent"), "the agent")
        until((machine.root / "var/lib/gpuctl/boot/agent.done").exists, "the end of the last step")
        assert not (machine.bucket / f"boot/{NODE}.json").exists()
    finally:
        lose_power(process)


_PROGRAMS = {
    "hold": "apt-mark",
    "driver": "modinfo",
    "fabric": "apt-get",
    "persistence": "nvidia-smi",
    "gate": "ibv_devinfo",
    "scratch": "lsblk",
    "docker": "apt-get",
    "toolkit": "nvidia-ctk",
    "cdi": "nvidia-ctk",
    "compiler": "apt-get",
    "gpuctl": "venv-python",
    "identity": "venv-python",
    "agent": "systemctl",
}
"""A program that each step runs."""


@pytest.mark.slow
@pytest.mark.parametrize("step", _PROGRAMS)
def test_power_lost_in_the_middle_of_a_step_and_the_next_boot_ends_well(
    make: Callable[..., BareMachine], step: str
) -> None:
    machine = make(promise=Promise(gpus=2, gpu_memory_gb=40, fabric="infiniband"))
    machine.without("docker", "gcc")
    before = (["program", *_PROGRAMS])[list(_PROGRAMS).index(step)]
    if step == "gate":
        machine.program("ibv_devinfo", "")
    caught = machine.trap(_PROGRAMS[step], after=before)
    process = machine.start()
    until(lambda: caught.exists() or process.poll() is not None, f"{step}")
    assert process.poll() is None, machine.log()
    lose_power(process)
    done = {path.stem for path in (machine.root / "var/lib/gpuctl/boot").glob("*.done")}
    assert step not in done
    machine.boot()
    assert machine.report()["state"] == "ready", machine.log()
    if step == "gpuctl":  # the broken environment was thrown away, and its stand-ins with it
        installed = machine.root / "opt/gpuctl/venv/bin/python"
        assert subprocess.run([installed, "-c", "import gpuctl"], timeout=60, check=True)
    ends = {one: machine.log().count(f" {one} done (") for one in _PROGRAMS}
    assert ends[step] == 1
    assert {one for one in done if ends.get(one, 0) > 1} <= {"scratch", "persistence", "gate", "cdi", "identity"}


def test_a_verb_that_is_none_is_refused(make: Callable[..., BareMachine]) -> None:
    machine = make()
    ran = subprocess.run(
        [sys.executable, "-m", "gpuctl_boot", "dance"], env=machine.env, capture_output=True, timeout=60, check=False
    )
    assert ran.returncode == 2


def test_a_machine_that_does_not_know_who_it_is_is_started_again(
    make: Callable[..., BareMachine], service: Service
) -> None:
    service.be_down()
    process = make().start()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said


def test_a_machine_of_ones_own_without_an_address_is_started_again_until_it_has_one(
    make: Callable[..., BareMachine],
) -> None:
    if not is_possible():
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    machine = make(provider="ssh", node=NODE, promise=Promise())
    holder = namespace()
    try:
        settings = [f"{name}={value}" for name, value in machine.env.items()]
        command = [*entering(holder), "env", *settings, sys.executable, "-m", "gpuctl_boot", "boot"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        holder.kill()
        holder.wait()
    assert ran.returncode == 1
    assert ran.stderr.endswith("OSError: this machine has no IP address yet\n")
    assert not (machine.bucket / f"boot/{NODE}.json").exists()
    machine.spec = replace(machine.spec, address="10.0.0.7")  # which ``up`` found
    machine.put_files()
    machine.boot()
    assert (machine.report()["state"], machine.report()["address"]) == ("ready", "10.0.0.7")


@pytest.mark.parametrize(
    "line",
    [
        "+::::::",
        "+@lab",
        "",
        "short:x:1000",
        "eve:x:many:1000::/home/eve:/bin/sh",
        "m\xfcller:x:0:0:M\xfcller:/:/bin/sh",
    ],
)
def test_lines_of_passwd_that_name_no_user_are_passed_over(make: Callable[..., BareMachine], line: str) -> None:
    machine = make(provider="ssh", node=NODE, address="127.0.0.1", promise=Promise())
    passwd = machine.root / "etc/passwd"
    passwd.write_bytes(line.encode("latin-1") + b"\n" + passwd.read_bytes())
    machine.boot()
    assert (machine.report()["state"], machine.report()["user"]) == ("ready", "ubuntu")


def test_whatever_ends_a_boot_is_told(make: Callable[..., BareMachine]) -> None:
    """Neither a step that failed nor an error of the system: a file of the program that the disk has lost."""
    machine = make(provider="ssh", node=NODE, address="127.0.0.1", promise=Promise())
    machine.boot()
    (machine.root / "opt/gpuctl/boot/gpuctl_boot/install.py").unlink()
    machine.boot()
    report = machine.report()
    assert (report["state"], report["step"]) == ("failed", "boot")
    assert report["reason"] == "ModuleNotFoundError: No module named 'gpuctl_boot.install'"
