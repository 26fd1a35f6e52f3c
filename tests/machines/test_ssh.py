"""Provider ssh, and the verbs that log in, on machines that boot: real systemd, sshd, sudo, rsync and tmux."""

from __future__ import annotations

import json
import shlex
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.e2e.machine import Cluster
from tests.fakes import sshd
from tests.fakes.stores import s3
from tests.machines.cloud import Cloud, Site
from tests.machines.machine import Machine
from tests.machines.network import HOST

SECRET = "not to be seen"
TRACES = (
    "ls -d /etc/gpuctl /opt/gpuctl /var/lib/gpuctl /run/gpuctl /var/log/gpuctl-boot.log /etc/systemd/system/gpuctl*"
)


WRITES_EVENTS = """
    import os
    from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(os.environ["GPUCTL_TENSORBOARD_DIR"]) as writer:
        writer.add_scalar("loss", 1.0, 0)
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""


class Lab(Cluster):
    """A user who can log in to machines that run already: as root to the first, as ``ada`` to the others."""

    def __init__(self, site: Site, folder: Path) -> None:
        super().__init__(folder / "state", folder / "work")
        self.site = site
        self.machines: list[Machine] = []
        self._folder = folder
        self._name = f"labs-{folder.name}".lower().replace("_", "-")[:60].rstrip("-")
        s3.create(f"http://127.0.0.1:{site.s3_door}", self._name)
        self.command = site.network.inside(*self.command)
        self.identity = sshd.make_key(folder / "id")
        ssh = folder / "home/.ssh"
        ssh.mkdir(parents=True)
        (ssh / "config").write_text(f"UserKnownHostsFile {ssh}/known_hosts\nIdentityFile {self.identity}\n")
        self.known_hosts = ssh / "known_hosts"
        self.known_hosts.touch()
        self.env |= {
            "HOME": str(folder / "home"),
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": site.index,
            "PIP_TRUSTED_HOST": HOST,
        }
        self.url = self._url(f"http://{HOST}:{site.s3_port}")

    @property
    def bucket(self) -> Bucket:
        keys = "&access_key_id=test&secret_access_key=test"
        return open_bucket(self._url(f"http://127.0.0.1:{self.site.s3_door}") + keys)

    def _url(self, endpoint: str) -> str:
        return f"s3://{self._name}/lab?endpoint={endpoint}&region=us-east-1"

    def switch_on(self, count: int) -> None:
        for index in range(count):
            name, address = f"m{index}", f"10.77.0.{10 + index}"
            folder = self._folder / name
            key = sshd.make_key(self._folder / f"host_key_{index}")
            public = key.with_suffix(".pub").read_text()
            files = {
                "/etc/cloud/cloud-init.disabled": "",
                "/etc/ssh/ssh_host_ed25519_key": key.read_text(),
                "/etc/ssh/ssh_host_ed25519_key.pub": public,
                "/root/.ssh/authorized_keys": self.identity.with_suffix(".pub").read_text(),
                "/etc/sudoers.d/ada": "ada ALL=(ALL) NOPASSWD: ALL\n",
            }
            made = Machine(self.site.network, folder, name, address, self.site.layers, files)
            (folder / "upper/etc/ssh/ssh_host_ed25519_key").chmod(0o600)
            with self.known_hosts.open("a") as file:
                file.write(f"{address} {public}")
            self.machines.append(made)
            made.switch_on()
        for machine in self.machines:
            self.wait(lambda machine=machine: _is_up(machine), f"{machine.name} to boot")  # type: ignore[misc]
            machine.run("sh", "-c", "useradd -m -s /bin/bash ada && cp -r /root/.ssh ~ada/ && chown -R ada ~ada/.ssh")

    def targets(self) -> str:
        return ",".join(m.address if m.name == "m0" else f"ada@{m.address}" for m in self.machines)

    def up_with(self, hosts: str, code: int = 0) -> str:
        done = self.run("up", "--provider", "ssh", "--hosts", hosts, "--bucket", self.url, code=code, timeout=300)
        return done.stdout + done.stderr

    def agents_said(self) -> str:
        return "\n".join(machine.said() for machine in self.machines)

    def end(self) -> None:
        for machine in self.machines:
            machine.discard()


@pytest.fixture
def lab(site: Site, tmp_path: Path) -> Iterator[Lab]:
    made = Lab(site, tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.timeout(600)
def test_machines_of_a_lab_become_a_cluster_train_and_are_left_as_they_were(lab: Lab) -> None:
    lab.switch_on(2)
    before = [_units(machine) for machine in lab.machines]
    said = lab.up_with(lab.targets())
    assert "cluster default is up: 2 nodes (ssh)" in said

    everywhere = lab.run("exec", "--all", "--", "hostname; id -un").stdout
    assert sorted(everywhere.split("\n")) == sorted(
        ["", "10.77.0.10 | m0", "10.77.0.10 | root", "10.77.0.11 | m1", "10.77.0.11 | ada"]
    )
    for machine in lab.machines:
        files = machine.run(
            "sh", "-c", f"grep -rlF {shlex.quote(SECRET)} /etc /opt/gpuctl/boot /var /run | xargs stat -c %a"
        )
        assert set(files.stdout.split()) == {"600"}
        assert SECRET not in machine.run("journalctl", "--no-pager").stdout
        assert machine.run("systemctl", "is-enabled", "gpuctl-idle", check=False).returncode != 0
    assert SECRET not in said
    lab.write("hello.py", WRITES_EVENTS)
    trained = lab.run("train", "hello.py").stdout
    assert "rank 0 of 2" in trained
    assert "rank 1 of 2" in trained

    _look_at_tensorboard(lab)

    lives = {name: record.incarnation for name, record in lab.nodes().items()}
    lab.up_with(lab.targets())
    assert {name: record.incarnation for name, record in lab.nodes().items()} == lives, "an agent was disturbed"
    lab.machines[1].run("systemctl", "stop", "gpuctl-agent")
    lab.up_with(lab.targets())
    assert lab.nodes()["10.77.0.11"].incarnation != lives["10.77.0.11"]

    life = lab.nodes()["10.77.0.11"].incarnation
    lab.machines[1].run("systemctl", "reboot", check=False)
    lab.wait(lambda: _life(lab, "10.77.0.11") not in ("", life), "the node to be back")
    lab.wait(lambda: _is_up(lab.machines[1]), "its sshd")

    done = lab.run("down", "--yes")
    assert "cluster default is down" in done.stdout
    for machine, units in zip(lab.machines, before, strict=True):
        assert machine.run("sh", "-c", f"{TRACES} 2>/dev/null", check=False).stdout == ""
        assert _units(machine) == units
        assert "gpuctl" not in machine.run("ps", "-eo", "args").stdout
    assert not list((lab.state / "ssh").glob("default.*"))


@pytest.mark.timeout(600)
def test_a_machine_that_cannot_be_reached_is_named_and_the_others_go_on(lab: Lab) -> None:
    lab.switch_on(2)
    targets = lab.targets()
    lab.machines[1].run("systemctl", "stop", "ssh.service", "ssh.socket", check=False)
    said = lab.up_with(targets, code=1)
    assert "10.77.0.10: ready" in said
    assert "error: cannot reach 10.77.0.11: Connection refused" in said
    assert said.splitlines()[-1].startswith("error: 1 of 2 machines did not become nodes: 10.77.0.11;")
    lab.machines[1].run("systemctl", "start", "ssh.service")
    assert "2 nodes" in lab.up_with(targets)

    lab.machines[1].run("systemctl", "stop", "ssh.service", "ssh.socket", check=False)
    left = lab.run("down", "--yes", code=1)
    assert "left: gpuctl on 10.77.0.11: cannot reach 10.77.0.11" in left.stdout
    assert lab.machines[0].run("sh", "-c", f"{TRACES} 2>/dev/null", check=False).stdout == ""
    lab.machines[1].run("systemctl", "start", "ssh.service")
    lab.run("down", "--yes")
    assert lab.machines[1].run("sh", "-c", f"{TRACES} 2>/dev/null", check=False).stdout == ""


def test_a_rented_machine_is_known_by_the_host_keys_that_its_boot_put_into_the_bucket(
    cloud: Cloud, tmp_path: Path
) -> None:
    identity = sshd.make_key(tmp_path / "id")
    ssh = tmp_path / "home/.ssh"
    ssh.mkdir(parents=True)
    (ssh / "config").write_text(f"IdentityFile {identity}\n")
    cloud.env["HOME"] = str(ssh.parent)
    keys = {
        "/etc/ssh/keys": identity.with_suffix(".pub").read_text(),
        "/etc/ssh/sshd_config.d/10-keys.conf": "AuthorizedKeysFile /etc/ssh/keys\n",
    }
    (instance,) = cloud.create(1, files=keys)
    cloud.await_ready()
    assert cloud.run("exec", "--", "id -un; sudo -n id -un").stdout.split() == ["debian", "root"]
    (cloud.folder / "weights").write_text("1")
    cloud.run("cp", "weights", "0:/tmp/")
    assert instance.machine.read("/tmp/weights") == "1"

    instance.machine.run("sh", "-c", "rm /etc/ssh/ssh_host_* && ssh-keygen -A && systemctl restart ssh")
    refused = cloud.run("exec", "--", "true", code=1)
    assert refused.stderr.startswith(f"error: {instance.id} presents a different host key than the one in the bucket")
    assert refused.stderr.count("\n") == 1


def _look_at_tensorboard(lab: Lab) -> None:
    """Of both nodes: one has its files from the bucket."""
    process = lab.start("forward", "tensorboard")
    assert process.stdout is not None
    try:
        said: list[str] = []
        while not (said and said[-1].startswith("http://")):
            said.append(process.stdout.readline().strip())
            assert said[-1] or process.poll() is None, "\n".join(said)
        runs = lab.wait(lambda: _read(lab, f"{said[-1]}/data/runs"), "TensorBoard to find the runs")
        assert sorted(runs) == ["000001-10.77.0.10", "000001-10.77.0.11"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.terminate()
        process.communicate(timeout=30)
    for machine in lab.machines:
        lab.wait(lambda m=machine: "tensorboard" not in m.run("ps", "-eo", "args").stdout, "its end")  # type: ignore[misc]


def _read(lab: Lab, url: str) -> list[str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read() -> list[str]:
        with opener.open(url, timeout=30) as answer:
            found: list[str] = json.load(answer)
            return found

    return lab.site.network.within(read)


def _life(lab: Lab, node: str) -> str:
    record = lab.nodes().get(node)
    return record.incarnation if record else ""


def _units(machine: Machine) -> list[str]:
    return sorted(machine.run("sh", "-c", "ls -R /etc/systemd/system").stdout.split())


def _is_up(machine: Machine) -> bool:
    try:
        return machine.run("systemctl", "is-active", "ssh.service", check=False).stdout.strip() == "active"
    except OSError:
        return False
