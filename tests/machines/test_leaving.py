"""Machines that remove themselves when nobody needs them, and what is left of those that leave."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.scripts import COUNTING
from tests.fakes.metadata import Provider
from tests.fakes.nvml import Driver
from tests.machines.cloud import Cloud, Instance, Site
from tests.machines.machine import Machine

IDLE_MINUTES = 0.2


@contextlib.contextmanager
def logged_in(cloud: Cloud, machine: Machine, key: Path) -> Iterator[subprocess.Popen[str]]:
    options = [
        "-i",
        str(key),
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "LogLevel=ERROR",
    ]
    command = cloud.site.network.inside("ssh", *options, f"root@{machine.address}", "echo in; sleep 600")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "in\n"
        try:
            yield session
        finally:
            session.kill()


def stays(cloud: Cloud, instance: Instance, times: float = 2.5) -> None:
    """It is still there when it would have been idle for so many times its limit."""
    until = time.monotonic() + times * 60 * IDLE_MINUTES
    cloud.wait(lambda: time.monotonic() > until or not instance.machine.is_on, "time to pass", 120)
    assert instance.machine.is_on and not cloud.terminated


def test_a_machine_leaves_when_it_has_neither_a_job_nor_a_login_and_not_before(cloud: Cloud, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=30)
    files = {"/root/.ssh/authorized_keys": key.with_suffix(".pub").read_text()}
    (instance,) = cloud.create(1, spec=cloud.spec(idle_minutes=IDLE_MINUTES), files=files)
    cloud.await_ready(timeout=120)
    job = cloud.train(cloud.write("count.py", COUNTING), "--", "--steps", "100000", "--rest", "0.2")
    cloud.wait_for_step(job, 1)
    stays(cloud, instance)
    with logged_in(cloud, instance.machine, key):
        cloud.run("cancel", job)
        cloud.wait_for_end(job)
        stays(cloud, instance)
    cloud.wait(lambda: not instance.machine.is_on, "it to leave", 120)
    assert cloud.terminated == [instance.id] and cloud.desired == 0


@pytest.mark.parametrize("provider", ["gcp", "azure"])
def test_on_other_clouds_too_a_notice_is_heeded_and_an_idle_machine_leaves(
    site: Site, tmp_path: Path, provider: Provider
) -> None:
    cloud = Cloud(site, tmp_path, provider)
    try:
        (instance,) = cloud.create(1, spec=cloud.spec(idle_minutes=IDLE_MINUTES))
        cloud.await_ready(timeout=120)
        job = cloud.train(cloud.write("count.py", COUNTING), "--", "--steps", "100000", "--every", "100000")
        cloud.wait_for_step(job, 20)
        cloud.take(instance, lead_s=30)
        saved = cloud.wait(lambda: cloud.checkpoints(job).entries, "a last checkpoint")
        assert saved[-1].reason == "notice"
        assert provider != "azure" or cloud.wait(lambda: cloud.metadata.acknowledged, "its word to Azure")
        cloud.run("cancel", job)
        cloud.wait(lambda: len(cloud.instances) == 2, "the group to replace it")
        cloud.wait(lambda: cloud.terminated == [cloud.instances[1].id], "the new one, which nobody uses, to leave", 150)
        cloud.wait(lambda: not cloud.instances[1].machine.is_on, "it to be off")
        assert cloud.desired == 0
    finally:
        cloud.end()


def test_a_node_that_leaves_keeps_no_process_and_no_mount(cloud: Cloud) -> None:
    (instance,) = cloud.create(1)
    cloud.await_ready(timeout=120)
    machine = instance.machine
    mounts = machine.read("/proc/mounts")
    job = cloud.train(cloud.write("count.py", COUNTING), "--", "--steps", "100000")
    cloud.wait_for_step(job, 20)
    assert len(ours(machine)) > 3, "the agent, the interpreter, the launcher, a worker"
    cloud.metadata.take(60, instance.id)
    alone: Callable[[], bool] = lambda: [line for line in ours(machine) if "gpuctl_boot idle" not in line] == []  # noqa: E731
    cloud.wait(alone, "all that is gpuctl's to end, but the watch")
    assert machine.read("/proc/mounts") == mounts
    assert instance.id not in cloud.nodes()


ESCAPES = """
import os, subprocess, time
from pathlib import Path
print([line for line in Path("/proc/self/cgroup").read_text().splitlines() if "gpuctl-agent" in line], flush=True)
if os.environ["GPUCTL_ROUND"] == "1":
    subprocess.run("env -i setsid sleep 98765 > /dev/null 2>&1 &", shell=True, check=True)
    launcher = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(launcher.rpartition(")")[2].split()[1]), 9)
    time.sleep(1000)
"""


def test_nothing_of_a_job_outlives_it(cloud: Cloud) -> None:
    """Here a process has nothing by which it is told, and the interpreter that would have adopted it is killed."""
    (instance,) = cloud.create(1)
    cloud.await_ready(timeout=120)
    script = cloud.write("escapes.py", ESCAPES)
    for how in ((), ("--env", "PYTHONHASHSEED=1")):  # from the warm interpreter, and with a new one
        job = cloud.train(script, *how)
        outcome = cloud.wait_for_end(job, timeout=150).outcome
        assert outcome and outcome.result == "succeeded", outcome
        rounds = re.findall(r"gpuctl-agent\.service/round-(\S+)-(\d)", cloud.run("logs", job).stdout)
        assert {*rounds} >= {(job, "2")} and {one for one, _ in rounds} == {job}
        assert not [line for line in running(instance.machine) if "98765" in line]
    folders = instance.machine.run("find", "/sys/fs/cgroup", "-name", "round-*").stdout
    assert folders == ""


def test_a_machine_whose_gpu_is_ill_is_held_for_a_look_and_then_replaced(cloud: Cloud, tmp_path: Path) -> None:
    library = b64encode(Driver(tmp_path).library.read_bytes()).decode()
    smi = "#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-0)'\n"
    unit = """[Service]
ExecStartPre=/bin/sh -c 'base64 -d /opt/nvml/packed > /opt/nvml/libnvidia-ml.so.1; touch /opt/nvml/says'
Environment=LD_LIBRARY_PATH=/opt/nvml NVML_SAYS=/opt/nvml/says
"""
    drop_in = "/etc/systemd/system/gpuctl-agent.service.d/nvml.conf"
    files = {"/usr/bin/nvidia-smi": smi, "/opt/nvml/packed": library, drop_in: unit}
    spec = cloud.spec(idle_minutes=IDLE_MINUTES, hold_ill_minutes=2 * IDLE_MINUTES)
    sick, well = cloud.create(2, "1:2", spec=spec, files=files)
    cloud.await_ready(timeout=180)
    job = cloud.train(
        cloud.write("count.py", COUNTING), "--", "--steps", "100000", "--every", "100000", "--rest", "0.1"
    )
    cloud.wait_for_step(job, 20)
    sick.machine.run("sh", "-c", "echo xid 0 79 > /opt/nvml/says")
    cloud.wait(lambda: cloud.checkpoints(job).entries, "a last checkpoint")
    cloud.wait(lambda: sick.machine.read("/run/gpuctl/ill"), "its word that it is ill")
    stays(cloud, sick, times=1.2)
    cloud.wait(lambda: sick.id in cloud.terminated, "it to leave", 120)
    assert (cloud.replaced, cloud.desired) == ([sick.id], 2)

    def trains_on_both() -> bool:
        now, new = cloud.now(job), cloud.instances[-1].id
        return now is not None and sorted(m.node for m in now.members) == sorted((well.id, new)) and new != well.id

    cloud.wait(trains_on_both, "the one that came in its place to train", 240)
    now = cloud.now(job)
    assert now and now.failures == 0


def ours(machine: Machine) -> list[str]:
    """What runs of gpuctl, by its command lines."""
    return [line for line in running(machine) if "gpuctl" in line]


def running(machine: Machine) -> list[str]:
    return machine.run("ps", "-eo", "args", "--no-headers").stdout.splitlines()
