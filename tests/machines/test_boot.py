"""From user-data to a node, on machines that boot."""

from __future__ import annotations

from gpuctl.bootstrap.node_spec import Promise
from tests.e2e.scripts import COUNTING
from tests.machines.cloud import Cloud, slowness
from tests.machines.packages import MODINFO, PYTHON, SMI

READY_WITHIN_S = 10.0
EIGHT_GPUS = Promise(gpus=8, gpu_memory_gb=40)


def test_user_data_makes_a_machine_with_its_packages_in_place_a_node_within_ten_seconds(cloud: Cloud) -> None:
    (instance,) = cloud.create(1)
    cloud.await_ready(timeout=120)
    began = float(instance.machine.run("stat", "-c", "%.Y", "/run/cloud-init/enabled").stdout)
    report = cloud.booted(instance)
    assert report
    print(f"ready {report.at - began:.1f} s after cloud-init began")
    assert report.at - began < READY_WITHIN_S * slowness()
    secrets = "find /etc/gpuctl /var/lib/gpuctl /opt/gpuctl/boot -type f -perm /077 | xargs -r grep -l 'a secret of'"
    assert instance.machine.run("sh", "-c", secrets, check=False).stdout == ""


def test_a_bare_machine_installs_everything_though_a_step_fails_twice_and_a_reboot_does_nothing_again(
    cloud: Cloud,
) -> None:
    source = f"deb [trusted=yes] {cloud.site.apt} ./"
    spec = cloud.spec(promise=EIGHT_GPUS)
    sources = {**spec.sources, **dict.fromkeys(("apt", "driver", "toolkit"), source)}
    (instance,) = cloud.create(1, spec=cloud.spec(promise=EIGHT_GPUS, sources=sources), layers=cloud.site.bare_layers)
    cloud.await_ready(timeout=350)
    machine = instance.machine
    log = machine.read("/var/log/gpuctl-boot.log")
    failed = [line for line in log.splitlines() if " cdi nvidia-ctk " in line and "the driver is not ready yet" in line]
    assert len(failed) == 2, log[-2000:]
    assert "nvidia-open" in machine.run("apt-mark", "showhold").stdout
    assert len(cloud.nodes()[instance.id].devices) == 8

    report, installed = cloud.booted(instance), machine.read("/var/log/dpkg.log")
    assert report
    first_life = cloud.nodes()[instance.id].incarnation
    machine.run("systemctl", "reboot", "--no-block")
    cloud.wait(lambda: (new := cloud.booted(instance)) and new.at > report.at and new.state == "ready", "a reboot", 120)
    assert cloud.nodes()[instance.id].incarnation != first_life
    assert machine.read("/var/log/dpkg.log") == installed, "what is done is done"
    assert instance.machine.is_on and len(cloud.instances) == 1, "the group did not take it for lost"


def test_a_machine_with_less_than_its_type_promises_says_so_and_removes_itself(cloud: Cloud) -> None:
    """For good: the group would replace it by the next one of this kind otherwise."""
    promise = Promise(gpus=8, gpu_memory_gb=80)
    stand_ins = {"bin/nvidia-smi": SMI, "bin/python3": PYTHON, "sbin/modinfo": MODINFO}
    files = {f"/usr/local/{name}": text for name, text in stand_ins.items()}
    (instance,) = cloud.create(1, spec=cloud.spec(promise=promise), files=files)
    cloud.wait(lambda: not instance.machine.is_on, "it to leave", 150)
    report = cloud.booted(instance)
    assert report and (report.state, report.step) == ("failed", "gate")
    assert "GPU 0 has 43 GB of memory, expected 80" in report.reason
    assert cloud.terminated == [instance.id] and cloud.desired == 0
    assert report.reason in cloud.run("logs", "--boot", instance.id).stdout


def test_a_disk_that_fills_ends_no_job(cloud: Cloud) -> None:
    (instance,) = cloud.create(1, disk_mb=64)
    cloud.await_ready(timeout=120)
    job = cloud.train(cloud.write("count.py", COUNTING), "--", "--steps", "600")
    cloud.wait_for_step(job, 40)
    machine = instance.machine
    machine.run("sh", "-c", "head -c 1G /dev/zero > /var/lib/gpuctl/filler; df /var/lib/gpuctl", check=False)
    assert "100%" in machine.run("df", "/var/lib/gpuctl").stdout
    step = cloud.step(job)
    cloud.wait(lambda: cloud.checkpoints(job).entries[-1].step > step + 100, "checkpoints to go on")
    machine.run("rm", "/var/lib/gpuctl/filler")
    outcome = cloud.wait_for_end(job).outcome
    assert outcome and outcome.result == "succeeded", outcome
