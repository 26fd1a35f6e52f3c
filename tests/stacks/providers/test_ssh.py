"""Provider ssh as far as it goes without changing a machine: real sshds on loopback, looked at and refused.

What it does to machines is tested on ones that may be changed, in tests/machines/test_ssh.py.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.node_spec import NodeSpec, Package
from gpuctl.bootstrap.user_data.render import PACKAGE, File, files
from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import BootReport, NodeRecord, SshHost
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.providers.interface import Dialog, UpRequest
from gpuctl.stacks.providers.ownership import place
from gpuctl.stacks.providers.ssh import SshProvider, bucket_keys
from gpuctl.stacks.providers.ssh_machine import _BEGIN, _NOT_OURS, MachineRefused, SshMachine, packed
from gpuctl.stacks.providers.ssh_progress import SetupProgress
from gpuctl.stacks.ssh import config as ssh_config
from gpuctl.stacks.ssh.hosts import read_hosts
from gpuctl.stacks.ssh.target import parse_target
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster
from tests.bench.network import entering, is_possible, namespace
from tests.fakes import sshd
from tests.fakes.sshd import Sshd
from tests.paths import ROOT

SPEC = NodeSpec(
    cluster="default",
    provider="ssh",
    bucket="s3://bucket/default",
    package=Package(wheel="w", sha256="0", constraints="c", constraints_sha256="1"),
    env={"AWS_SECRET_ACCESS_KEY": "not to be seen"},
)
_GATEWAY = "ip route add default via 10.77.0.1 dev eth0"
_LOOKS = """
import json, sys
from pathlib import Path
from gpuctl.stacks.providers.ssh_machine import SshMachine
from gpuctl.stacks.ssh import config
from tests.fakes import sshd
address, home = sys.argv[1], Path.home()
with sshd.serving(home / "sshd", address=address) as server:
    (home / ".ssh").mkdir(exist_ok=True)
    known_hosts = home / "known_hosts"
    known_hosts.write_text(f"[{address}]:{server.port} {server.host_key}\\n")
    settings = f"IdentityFile {server.identity}\\nUserKnownHostsFile {known_hosts}\\n"
    (home / ".ssh/config").write_text(settings)
    found = SshMachine("lab", ("-p", str(server.port), address), config.write("default", []), home).look()
print(json.dumps([found.address, *found.troubles]))
"""
"""Serves a machine's sshd at an address, and prints the address and the troubles that a look at it finds."""


@dataclass
class User:
    """Whose ssh is configured for one sshd, under the name ``lab``."""

    home: Path
    server: Sshd

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"

    def knows(self, key: str) -> None:
        self.known_hosts.write_text(f"[127.0.0.1]:{self.server.port} {key}\n")

    def machine(self, *words: str) -> SshMachine:
        logs = self.home / "logs"
        logs.mkdir(exist_ok=True)
        return SshMachine("lab", words or ("lab",), ssh_config.write("default", []), logs)


@dataclass
class StandIn:
    """A machine ``lab`` that says nothing leads out of it, keeps only ``node.json`` of what ``begin`` puts there, and
    tells the bucket at once that it is ready: nothing is changed where this test runs."""

    user: User
    url: str

    def __post_init__(self) -> None:
        server, answers = self.user.server, self.user.home / "answers"
        self.node_json = self.user.home / "node.json"
        answers.write_text(
            f"""case "$SSH_ORIGINAL_COMMAND" in
            *"tar -C / -xf -"*)
                tar -xO etc/gpuctl/node.json >{self.node_json}
                mkdir -p {self.url[7:]}/boot
                echo '{{"node": "lab", "state": "ready"}}' >{self.url[7:]}/boot/lab.json;;
            *"rm -rf "*) rm {self.node_json};;
            *)
                printf 'gpuctl:%s\\n' system=Linux systemd=yes root=yes python=3.11 address=10.77.0.10
                sed -n 's/.*"cluster": "\\([^"]*\\)".*/gpuctl:cluster=\\1/p' {self.node_json}
                sed -n 's/.*"bucket": "\\([^"]*\\)".*/gpuctl:bucket=\\1/p' {self.node_json} || true;;
            esac\n"""
        )
        with (server.folder / "sshd_config").open("a") as config:
            config.write(f"ForceCommand sh {answers}\n")

    def up(self, url: str) -> None:
        self.asked(UpRequest(name="default", nodes_min=1, nodes_max=1, bucket=url, hosts=("lab",)))

    def asked(self, request: UpRequest) -> ClusterSpec:
        """The cluster's record after an ``up``."""
        SshProvider("ssh", Dialog(print)).up(request)
        return decode(open_bucket(self.url).get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)

    def down(self, *, force: bool = False) -> list[str]:
        return SshProvider("ssh", Dialog(print)).down(clusters.find("default"), force=force)


@dataclass
class Dropped:
    """A machine ``lab`` of the cluster ``default``, that no ``up`` names any more."""

    user: User
    url: str
    other: str
    """What ``up`` names: nothing that can be reached, so that no machine is made a node."""
    said: list[str] = field(default_factory=list)

    @property
    def store(self) -> Bucket:
        return open_bucket(self.url)

    def host(self) -> SshHost:
        return decode(self.store.get(layout.ssh_host("lab")) or b"", SshHost, "lab")

    def record(self, port: int, *, is_dropped: bool = False) -> None:
        server = self.user.server
        about = SshHost(
            node="lab",
            target="lab",
            host="127.0.0.1",
            port=port,
            identities=(str(server.identity),),
            host_keys=(server.host_key,),
            dropped=is_dropped,
        )
        self.store.put(layout.ssh_host("lab"), encode(about))

    def is_back(self, says: str) -> None:
        """It answers whatever it is told with ``says``, so that nothing is changed where this test runs."""
        config = self.user.server.folder / "sshd_config"
        lines = [line for line in config.read_text().splitlines() if not line.startswith("ForceCommand ")]
        config.write_text("\n".join([*lines, f"ForceCommand {says}", ""]))
        self.record(self.user.server.port, is_dropped=True)

    def up(self) -> None:
        self.said.clear()
        request = UpRequest(name="default", nodes_min=1, nodes_max=1, bucket=self.url, hosts=(self.other,))
        with pytest.raises(GpuctlError, match=r"1 of 1 machines did not become nodes: 127.0.0.1"):
            SshProvider("ssh", Dialog(self.said.append)).up(request)

    def down(self, *, force: bool = False) -> list[str]:
        self.said.clear()
        return SshProvider("ssh", Dialog(self.said.append)).down(clusters.find("default"), force=force)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / ".ssh").mkdir()
    with sshd.serving(tmp_path / "sshd") as server:
        made = User(tmp_path, server)
        made.knows(server.host_key)
        (tmp_path / ".ssh" / "config").write_text(
            f"Host lab\n  HostName 127.0.0.1\n  Port {server.port}\n"
            f"Host *\n  IdentityFile {server.identity}\n  UserKnownHostsFile {made.known_hosts}\n"
        )
        yield made


# -- what is named -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "most", "bucket", "said"),
    [
        ((), 1, "file:///x", "no machines given; for example --hosts lab-1,lab-2"),
        (("a", "b@a"), 2, "file:///x", "a appears twice in --hosts; name each machine once"),
        (("a", "b"), 3, "file:///x", "3 nodes on 2 machines; remove --nodes, or give as many machines"),
        (("a",), 1, None, "your own machines need a bucket that all of them can reach; for example --bucket s3://…"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_anything_is_done(
    hosts: tuple[str, ...], most: int, bucket: str | None, said: str
) -> None:
    request = UpRequest(name="default", nodes_min=1, nodes_max=most, bucket=bucket, hosts=hosts)
    with pytest.raises(BadInput) as refusal:
        SshProvider("ssh", Dialog(print)).up(request)
    assert str(refusal.value) == said


def test_only_what_the_bucket_needs_goes_from_the_environment_to_the_machines() -> None:
    env = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "c", "AWS_PROFILE": "d", "HOME": "e"}
    assert set(bucket_keys("s3://bucket/x", env, print)) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"}
    assert bucket_keys("s3://bucket/x?access_key_id=a&secret_access_key=b", env, print) == {}
    assert bucket_keys("file:///shared", env, print) == {}
    said: list[str] = []
    bucket_keys("s3://bucket/x", {**env, "AWS_SESSION_TOKEN": "f"}, said.append)
    assert said == ["these credentials expire; `gpuctl up` again gives the machines new ones"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/x", "the machines need credentials for the bucket, and the environment has none"),
        ("gs://bucket/x", "your own machines have no credentials for gs://"),
        ("az://bucket/x?account_name=me", "your own machines have no credentials for az://"),
    ],
)
def test_a_bucket_that_the_machines_could_not_use_is_refused(url: str, said: str) -> None:
    with pytest.raises(BadInput) as refusal:
        bucket_keys(url, {}, print)
    assert refusal.value.message == said


# -- a look at a machine -----------------------------------------------------------------------------------------------


def test_a_look_finds_what_is_missing_for_a_node(user: User) -> None:
    has_systemd = Path("/run/systemd/system").is_dir()
    troubles = " ".join(user.machine().look().troubles)
    assert ("it does not run Linux" in troubles) == (platform.system() != "Linux")
    assert ("it does not run systemd" in troubles) == (platform.system() == "Linux" and not has_systemd)
    if os.geteuid() == 0:
        assert "root" not in troubles


def test_how_others_reach_it_is_what_this_users_ssh_knows(user: User) -> None:
    machine = user.machine()
    about = machine.about(parse_target("lab"), machine.look())
    assert (about.node, about.target, about.host, about.port) == ("lab", "lab", "127.0.0.1", user.server.port)
    assert about.user == user.server.user
    assert about.identities == (str(user.server.identity),)
    assert " ".join(user.server.host_key.split()[:2]) == about.host_keys[0]
    by_port = user.machine("-p", str(user.server.port), "127.0.0.1")
    assert by_port.about(parse_target("lab"), machine.look()).host_keys[0] == about.host_keys[0]


def test_a_machine_that_only_a_command_of_this_user_reaches_is_refused(user: User) -> None:
    """Others do not have it, and it is not kept."""
    config = user.home / ".ssh" / "config"
    usual = config.read_text()
    # ssh hangs up on the last of these as it leaves; the other sends what is still to be sent, and ends.
    to_it = f"exec 3<>/dev/tcp/127.0.0.1/{user.server.port}; cat <&0 >&3 & exec cat <&3"
    config.write_text(f"Host lab\n  ProxyCommand bash -c '{to_it}'\n{usual}")
    machine = user.machine()
    facts = machine.look()
    with pytest.raises(MachineRefused, match="lab is reached by a ProxyCommand, which is not supported; use ProxyJump"):
        machine.about(parse_target("lab"), facts)
    config.write_text(f"Host lab\n  ProxyCommand none\n{usual}")
    assert machine.about(parse_target("lab"), facts).host == "127.0.0.1"
    config.write_text(f"Host lab\n  ProxyJump gate\n{usual}")
    assert machine.about(parse_target("lab"), facts).jump == "gate"


def test_a_machine_has_answered_when_ssh_ends_whoever_holds_its_pipes(user: User) -> None:
    config, left = user.home / ".ssh" / "config", user.home / "left"
    # The `sleep` is left behind, and has the error stream that ssh has.
    to_it = f"exec 3<>/dev/tcp/127.0.0.1/{user.server.port}; cat <&0 >&3 & sleep 10 & echo $! >{left}; exec cat <&3"
    config.write_text(f"Host lab\n  ProxyCommand bash -c '{to_it}'\n{config.read_text()}")
    user.machine().look()
    holder = psutil.Process(int(left.read_text()))
    assert holder.status() != psutil.STATUS_ZOMBIE
    holder.kill()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["10.77.0.10", "fd77::10", "127.0.0.1"])
def test_where_nothing_leads_out_of_a_machine_it_has_the_address_that_ssh_came_to(tmp_path: Path, address: str) -> None:
    if not is_possible():
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    holder = namespace()
    try:
        inside = entering(holder)
        for command in (
            "ip link set lo up",
            "ip link add eth0 type veth peer name far",
            "ip link set far up",
            "ip link set eth0 up",
            "ip addr add 10.77.0.10/24 dev eth0",
            "ip -6 addr add fd77::10/64 dev eth0 nodad",
        ):
            subprocess.run([*inside, *command.split()], check=True, timeout=20)

        def look() -> list[str]:
            env = {**os.environ, "HOME": str(tmp_path), "GPUCTL_STATE_DIR": str(tmp_path / "state")}
            command = [*inside, sys.executable, "-c", _LOOKS, address]
            done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, timeout=60, check=True)
            found: list[str] = json.loads(done.stdout)
            return [one for one in found if "route" in one or one == address]

        trouble = "no route leads out of it, and ssh came to 127.0.0.1, where no other machine finds it"
        assert look() == ([address, trouble] if address == "127.0.0.1" else [address])
        subprocess.run([*inside, *_GATEWAY.split()], check=True, timeout=20)
        assert look() == [], "the way out goes before"
    finally:
        holder.kill()
        holder.wait()


def test_a_machine_whose_host_key_nobody_knows_is_refused(user: User) -> None:
    user.known_hosts.write_text("")
    with pytest.raises(MachineRefused, match=r"the host key of lab is unknown; log in once and compare it: ssh lab"):
        user.machine().look()
    assert user.known_hosts.read_text() == ""


def test_a_machine_with_another_host_key_is_refused(user: User) -> None:
    user.knows(sshd.make_key(user.home / "other").with_suffix(".pub").read_text())
    with pytest.raises(MachineRefused, match="lab presents a different host key than the known one, so it was refused"):
        user.machine().look()


def test_a_machine_that_does_not_answer_is_said(user: User) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(
            MachineRefused, match=r"cannot reach lab at 127.0.0.1: Connection refused; try it by hand: ssh -p"
        ):
            user.machine("-p", str(free.getsockname()[1]), "127.0.0.1").look()


@pytest.mark.usefixtures("user")
def test_all_that_cannot_be_nodes_are_named_and_nothing_is_left_of_them(file_url: str) -> None:
    """Two that are never reached, so that whoever runs this test keeps the machine that it runs on."""
    said: list[str] = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        hosts = (f"127.0.0.1:{port}", f"127.0.0.2:{port}")
        request = UpRequest(name="default", nodes_min=2, nodes_max=2, bucket=file_url, hosts=hosts)
        with pytest.raises(Exception, match=r"2 of 2 machines did not become nodes: 127.0.0.\d, 127.0.0.\d; fix them"):
            SshProvider("ssh", Dialog(said.append)).up(request)
    assert sorted(line.partition(";")[0] for line in said) == [
        "error: cannot reach 127.0.0.1: Connection refused",
        "error: cannot reach 127.0.0.2: Connection refused",
    ]
    cluster = clusters.find("default")
    assert SshProvider("ssh", Dialog(said.append)).down(cluster) == []
    assert open_bucket(file_url).get(layout.CLUSTER) is None


# -- whose node it is --------------------------------------------------------------------------------------------------


def test_a_machine_without_a_way_out_is_told_the_address_that_up_came_to(user: User, file_url: str) -> None:
    machine = StandIn(user, file_url)
    machine.up(file_url)
    assert json.loads(machine.node_json.read_text())["address"] == "10.77.0.10"


def test_a_shutdown_of_a_machine_of_ones_own_lasts_as_long_as_systemd_waits(user: User, file_url: str) -> None:
    machine = StandIn(user, file_url)
    machine.up(file_url)
    assert json.loads(machine.node_json.read_text())["shutdown_s"] == 140


@pytest.mark.slow
def test_what_is_not_said_again_stays(user: User, file_url: str) -> None:
    """What other providers keep is in tests/cli/commands/machines/test_staying.py."""
    machine = StandIn(user, file_url)
    first = machine.asked(
        UpRequest(name="default", nodes_max=1, bucket=file_url, hosts=("lab",), slots=2, stall_minutes=60.0)
    )
    assert (first.nodes_max, first.slots, first.stall_minutes) == (1, 2, 60.0)
    noted = clusters.find("default")
    assert machine.asked(UpRequest(name="default")) == first
    assert clusters.find("default") == noted and noted.hosts == ("lab",)
    with pytest.raises(BadInput, match=r"slots=2, not 3; run `gpuctl down` first"):
        machine.asked(UpRequest(name="default", slots=3))
    assert clusters.find("default") == noted


@pytest.mark.slow
def test_a_bucket_whose_url_is_written_otherwise_is_the_same_one(user: User, file_url: str) -> None:
    machine = StandIn(user, file_url)
    machine.up(file_url)
    machine.up(f"{file_url}/")
    clusters.remember(KnownCluster(name="default", provider="ssh", bucket=f"{file_url}//"))
    assert machine.down() == []
    assert not machine.node_json.exists(), "it was not left"


def test_neither_keys_nor_their_order_make_another_bucket() -> None:
    first = place("s3://bucket/lab/x?region=a&endpoint=https://minio:9000&access_key_id=1")
    assert first == place("s3://bucket/lab%2Fx/?access_key_id=2&endpoint=https://minio:9000&region=a")
    others = ("s3://bucket/lab/y", "s3://lab/x", "gs://bucket/lab/x", "s3://bucket")
    assert first not in {place(url) for url in others}


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("az://box/p?account_name=a", "az://box/p?AZURE_STORAGE_ACCOUNT_NAME=a", "az://box/p?account_name=b"),
        ("s3://b/p?endpoint=http://x:1", "s3://b/p?aws_endpoint_url=http://x:1/", "s3://b/p?endpoint=http://x:2"),
        ("gs://b/p?base_url=http://x:1", "gs://b/p?google_base_url=http://x:1", "gs://b/p"),
    ],
)
def test_an_account_or_an_endpoint_makes_another_bucket(one: str, same: str, other: str) -> None:
    assert place(one) == place(same) != place(other)


@pytest.mark.slow
def test_a_machine_of_a_namesake_is_named_as_left(user: User, file_url: str) -> None:
    machine = StandIn(user, file_url)
    machine.up(file_url)
    machine.node_json.write_text(machine.node_json.read_text().replace(file_url, "s3://else/lab?secret_access_key=x"))
    said = "gpuctl on lab: lab is a node of a cluster of the same name at s3://else/lab"
    assert machine.down() == [said]
    assert machine.node_json.exists()
    assert clusters.find("default").bucket == file_url
    assert machine.down(force=True) == []
    assert machine.node_json.exists()


def test_a_cluster_is_not_forgotten_for_a_namesake_at_another_bucket(user: User, file_url: str) -> None:
    machine = StandIn(user, file_url)
    machine.up(file_url)
    with pytest.raises(BadInput, match=f"'default' has its bucket at {file_url}, not {file_url}-else"):
        machine.up(f"{file_url}-else")
    assert machine.down() == []
    assert not machine.node_json.exists()


# -- a machine that is dropped -----------------------------------------------------------------------------------------


@pytest.fixture
def dropped(user: User, file_url: str) -> Iterator[Dropped]:
    """One of ``up`` before, unreachable now, which the next ``up`` does not name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        made = Dropped(user, file_url, f"127.0.0.1:{free.getsockname()[1]}")
        made.record(free.getsockname()[1])
        made.up()
        yield made


def test_a_machine_that_is_dropped_while_nobody_reaches_it_is_left_by_a_later_down(dropped: Dropped) -> None:
    assert (
        "lab: removed from the cluster, but gpuctl still runs there until `up` or `down` reaches it: cannot reach"
        in dropped.said[0]
    )
    assert dropped.host() == replace(dropped.host(), dropped=True)
    beats_again = NodeRecord(node="lab", incarnation="after a reboot", beat=1, address="127.0.0.1", port=1)
    dropped.store.put(layout.node("lab"), encode(beats_again))
    assert [host.takes_part for host in read_hosts(dropped.store)] == [False]
    (left,) = dropped.down()
    assert left.startswith("gpuctl on lab: cannot reach lab")
    assert dropped.said[0] == "lab: removed earlier but not cleaned up; trying again"
    assert dropped.said[-1] == "for a machine that is gone for good: `gpuctl down --force`"
    dropped.is_back("true")
    assert dropped.down() == []
    assert "lab: no longer a node" in dropped.said
    assert dropped.store.list(layout.HOSTS) == []
    assert dropped.store.get(layout.CLUSTER) is None


@pytest.mark.slow
def test_a_machine_that_was_dropped_is_left_by_a_later_up(dropped: Dropped) -> None:
    dropped.up()
    assert dropped.said[0] == "lab: removed earlier but not cleaned up; trying again"
    assert dropped.host().dropped
    dropped.is_back("echo gpuctl:left=/opt/gpuctl")
    dropped.up()
    assert "left: /opt/gpuctl on lab" in dropped.said
    assert dropped.host().dropped, "something is left there"
    dropped.is_back("true")
    dropped.up()
    assert "lab: no longer a node" in dropped.said
    assert dropped.store.list(layout.HOSTS) == []


def test_a_machine_that_is_gone_for_good_is_forgotten_where_that_is_said(dropped: Dropped) -> None:
    assert dropped.down(force=True) == []
    assert any(
        line.startswith("lab: removed from the records, though gpuctl and keys are still on it: cannot reach")
        for line in dropped.said
    )
    assert dropped.store.list(layout.HOSTS) == []
    assert clusters.get("default") is None


# -- as a node ---------------------------------------------------------------------------------------------------------


def test_what_is_put_there_unpacks_as_it_was_meant_and_lets_nothing_end_the_machine(tmp_path: Path) -> None:
    wanted = {path: file for path, file in files(SPEC).items() if path not in _NOT_OURS}
    subprocess.run(("tar", "-C", str(tmp_path), "-xf", "-"), input=packed(wanted, 1e9), check=True, timeout=10)
    there = {f"/{path.relative_to(tmp_path)}" for path in tmp_path.rglob("*") if path.is_file()}
    assert there == set(wanted)
    assert (tmp_path / "etc/gpuctl/node.json").stat().st_mode & 0o777 == 0o600
    holders = [path for path in there if "not to be seen" in (tmp_path / path[1:]).read_text()]
    assert holders == ["/etc/gpuctl/node.json"]
    assert set(files(SPEC)) - there == set(_NOT_OURS), "user-data has something that this provider must judge"


def test_a_second_up_runs_its_own_boot_program_of_whatever_size(tmp_path: Path) -> None:
    """Where Python has compiled the first one; both were written in the same second."""
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text("#!/bin/sh\n")
    systemctl.chmod(0o755)
    here = _BEGIN.replace("/opt/", f"{tmp_path}/opt/").replace("/etc/", f"{tmp_path}/etc/")
    here = here.replace("tar -C / ", f"tar -C {tmp_path} ")
    parent, _, name = PACKAGE.rpartition("/")
    env = {"PATH": f"{systemctl.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}{parent}"}
    for word in ("one", "two"):
        texts = {f"{PACKAGE}/__init__.py": f"WORD = {word!r}\n", "/etc/gpuctl/node.json": "{}"}
        program = packed({path: File(text, "0644") for path, text in texts.items()}, 1e9)
        subprocess.run(("sh", "-c", here), input=program, env=env, check=True, timeout=10)
        assert (tmp_path / f"{PACKAGE[1:]}/__init__.py").stat().st_mtime == 1e9
        command = (sys.executable, "-c", f"import {name}; print({name}.WORD)")
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=10)
        assert done.stdout.strip() == word
    assert list((tmp_path / PACKAGE[1:]).glob("__pycache__/*.pyc")), "nothing was compiled"


@pytest.mark.slow
def test_a_boot_that_ends_without_a_word_to_the_bucket_is_not_waited_for(user: User, file_url: str) -> None:
    """On this machine no boot program runs."""
    if os.geteuid() != 0:
        pytest.skip("only root can ask for it")
    began = time.monotonic()
    troubles = SetupProgress(open_bucket(file_url), [user.machine()], print, quiet_s=0.0).until_ready()
    assert "lab ended its boot without reporting to the bucket" in str(troubles["lab"])
    assert time.monotonic() - began < 20


def test_what_machines_tell_the_bucket_is_said_once(user: User, file_url: str) -> None:
    store = open_bucket(file_url)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        booting = BootReport(node="lab", state="booting", step=f"step {len(said)}")
        report = BootReport(node="lab", state="ready") if len(said) == 2 else booting
        store.put(layout.boot_report("lab"), encode(report))

    say("begin")
    assert SetupProgress(store, [user.machine()], say).until_ready() == {}
    assert said == ["begin", "lab: step 1", "lab: ready"]


def test_a_machine_that_failed_is_not_waited_for(user: User, file_url: str) -> None:
    store = open_bucket(file_url)
    failed = BootReport(node="lab", state="failed", step="gpuctl", reason="no space left")
    store.put(layout.boot_report("lab"), encode(failed))
    troubles = SetupProgress(store, [user.machine()], print).until_ready()
    assert str(troubles["lab"]) == "lab did not become a node: gpuctl: no space left; see `gpuctl logs --boot lab`"


# -- what ssh is told --------------------------------------------------------------------------------------------------


def test_what_ssh_was_told_of_a_cluster_is_forgotten_with_it(user: User, file_url: str) -> None:
    store = open_bucket(file_url)
    store.put(layout.ssh_host("lab"), encode(SshHost(node="lab", target="lab", host="127.0.0.1")))
    clusters.remember(KnownCluster(name="default", provider="ssh", bucket=file_url))
    for name in ("default", "default-2"):
        ssh_config.write(name, read_hosts(store))
    clusters.forget("default")
    assert sorted(path.name for path in (user.home / "state" / "ssh").iterdir()) == [
        f"default-2.{kind}" for kind in ("conf", "config", "known_hosts")
    ]


def test_the_line_goes_into_the_file_that_a_link_leads_to(user: User) -> None:
    config = user.home / ".ssh" / "config"
    dotfiles = user.home / "dotfiles"
    config.rename(dotfiles)
    config.symlink_to(dotfiles)
    text = dotfiles.read_text()
    assert ssh_config.install() == (config, True)
    assert config.is_symlink()
    assert dotfiles.read_text().endswith(f"\n\n{text}")


def test_a_first_configuration_is_its_owners_alone(user: User) -> None:
    config = user.home / ".ssh" / "config"
    config.unlink()
    config.parent.rename(user.home / "elsewhere")
    ssh_config.install()
    assert (config.stat().st_mode & 0o777, config.parent.stat().st_mode & 0o777) == (0o600, 0o700)
