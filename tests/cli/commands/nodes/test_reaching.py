"""Each way to a node of a cloud, walked: the verbs that log in, against the records of a real boot and a real sshd.

``local`` is in ``tests/e2e/test_nodes.py``, ``ssh`` in ``tests/machines/test_ssh.py``.
"""

from __future__ import annotations

import getpass
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from gpuctl.bootstrap.boot.metadata import Metadata
from gpuctl.bootstrap.boot.report import Reporter
from gpuctl.bootstrap.boot.store import FolderStore
from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import BootReport
from tests.bench.network import entering, is_possible, namespace
from tests.cli.session.test_node_access import Terminal, first_line, page_port, read, settings_of
from tests.fakes import sshd
from tests.fakes.aws.cli import Account, Stand
from tests.fakes.metadata import Provider, Service
from tests.fakes.sshd import Sshd
from tests.fakes.written_cluster import WrittenCluster
from tests.waiting import PATIENCE_S, until

__all__ = ["page_port"]

FIRST, SECOND = "i-0123456789abcdef0", "i-0fedcba9876543210"
NOT_REACHED = f"cannot reach {FIRST} through AWS's Instance Connect Endpoint"
PUBLIC = "203.0.113.9"
_READS = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


class Rented(WrittenCluster):
    """A cluster of a cloud, and a user whose one key logs in to its nodes."""

    def __init__(self, home: Path, url: str, provider: Provider) -> None:
        if sshd.SSHD is None:
            pytest.skip("no sshd here: apt-get install openssh-server")
        super().__init__(home, url, provider=provider)
        self.provider: Provider = provider
        self.identity = sshd.make_key(home / "id")
        configuration = home / "home" / ".ssh" / "config"
        configuration.parent.mkdir(parents=True)
        configuration.write_text(f"IdentityFile {self.identity}\nIdentitiesOnly yes\n")
        self.env = {name: value for name, value in self.env.items() if not name.startswith("AWS_")}
        self.env["HOME"] = str(home / "home")

    def boots(self, node: str, host_key: str, *, address: str, public_address: str = "") -> None:
        """``node`` writes what its boot program writes: what its cloud's metadata service tells it, and its keys."""
        machine = self.home / f"machine-{node}"
        home = machine / "home" / "somebody" / ".ssh"
        for folder in (machine / "etc" / "ssh", machine / "var" / "log", home):
            folder.mkdir(parents=True)
        (home / "authorized_keys").write_text("")
        (machine / "etc" / "passwd").write_text(f"{getpass.getuser()}:x:1000:1000::/home/somebody:/bin/sh\n")
        (machine / "etc" / "ssh" / "ssh_host_ed25519_key.pub").write_text(f"{host_key}\n")
        service = Service(self.provider)
        service.machine.id, service.machine.address, service.machine.public_address = node, address, public_address
        with service.running():
            instance = Metadata(self.provider, endpoint=service.url).instance()
            assert (instance.id, instance.address, instance.public_address) == (node, address, public_address)
            assert Reporter(machine, node, instance, FolderStore(self.url.removeprefix("file://"))).tell("ready")


class Behind(Rented):
    """On AWS, behind an Instance Connect Endpoint: two nodes with several network cards, and so no public address."""

    def __init__(self, home: Path, url: str, stack: ExitStack) -> None:
        super().__init__(home, url, "aws")
        self.servers: dict[str, Sshd] = {}
        for number, node in enumerate((FIRST, SECOND), start=5):
            env = {"GPUCTL_TEST_NODE": node}
            server = stack.enter_context(sshd.serving(home / f"sshd-{node}", identity=self.identity, env=env))
            self.servers[node] = server
            self.boots(node, server.host_key, address=f"10.77.0.{number}")
            self.beat(node, address=f"10.77.0.{number}", incarnation=node)
        self.lead(FIRST, address="10.77.0.5", incarnation=FIRST)
        self.account = Account(
            instances={node: server.port for node, server in self.servers.items()}, profiles=["research"]
        )
        self.aws = Stand(home / "aws-bin", self.account)
        self.env |= {"PATH": f"{self.aws.folder}:{self.env['PATH']}", "AWS_ACCESS_KEY_ID": "a"}


@pytest.fixture
def behind(tmp_path: Path, file_url: str) -> Iterator[Behind]:
    with ExitStack() as stack:
        yield Behind(tmp_path, file_url, stack)


# -- public addresses --------------------------------------------------------------------------------------------------


@pytest.fixture
def own_network() -> Iterator[list[str]]:
    """What a command begins with to run where ``PUBLIC`` is the address of a machine whose ports nobody has."""
    if not is_possible():
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    holder = namespace()
    inside = entering(holder)
    try:
        for command in ("ip link set lo up", f"ip addr add {PUBLIC}/32 dev lo"):
            subprocess.run([*inside, *command.split()], check=True, timeout=20)
        yield inside
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "node"), [("aws", FIRST), ("gcp", "demo-x1y2"), ("azure", "demo_3")])
def test_a_node_with_a_public_address_is_reached_at_it(
    tmp_path: Path, file_url: str, own_network: list[str], provider: Provider, node: str
) -> None:
    cluster = Rented(tmp_path, file_url, provider)
    cluster.inside = own_network
    serve = [sys.executable, "-m", "tests.fakes.sshd", tmp_path / "sshd", cluster.identity, PUBLIC, "22", node]
    pages = [sys.executable, "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", cluster.work]
    with ExitStack() as stack:
        for command in (serve, pages):
            process = stack.enter_context(
                subprocess.Popen(
                    [*own_network, *map(str, command)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
            stack.callback(process.kill)
            if command is serve:
                assert process.stdout is not None
                host_key = process.stdout.readline().decode().strip()
        cluster.boots(node, host_key, address="10.77.0.5", public_address=PUBLIC)
        cluster.lead(node, address="10.77.0.5", incarnation="1")
        walk(cluster, node)
        forwarded = cluster.start("forward", "8000")
        stack.callback(forwarded.wait, PATIENCE_S)
        stack.callback(forwarded.terminate)
        url = first_line(forwarded)
        (cluster.work / "page").write_text("hello")
        seen = subprocess.run(
            [*own_network, sys.executable, "-c", _READS, f"{url}/page"], capture_output=True, text=True, timeout=60
        )
        assert seen.stdout == "hello\n", seen.stderr


# -- behind an endpoint ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_behind_an_endpoint_is_reached_through_it(behind: Behind, page_port: int) -> None:
    walk(behind, FIRST)
    said = behind.run("exec", "1", "--", "echo $GPUCTL_TEST_NODE")
    assert (said.stdout, said.stderr) == (f"{SECOND}\n", "")
    assert behind.servers[SECOND].connections == 1, "no other node is on the way"
    process = behind.start("forward", str(page_port), "--node", SECOND)
    assert read(f"{first_line(process)}/x") == "page /x"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    for call in behind.aws.calls():
        assert call[:2] == ["ec2-instance-connect", "open-tunnel"]
        assert call[call.index("--region") + 1] == "us-east-1"
    until(lambda: not behind.aws.running(), "all tunnels to be closed")


@pytest.mark.slow
def test_all_nodes_behind_an_endpoint_are_reached_at_once(behind: Behind) -> None:
    done = behind.run("exec", "--all", "--", "echo I am $GPUCTL_TEST_NODE")
    assert sorted(done.stdout.splitlines()) == [f"{node} | I am {node}" for node in (FIRST, SECOND)]
    assert done.stderr == ""


@pytest.mark.slow
def test_a_person_gets_a_terminal_through_an_endpoint(behind: Behind) -> None:
    with Terminal(behind, "ssh", SECOND) as terminal:
        terminal.type("test -t 0 && echo it is $GPUCTL_TEST_NODE''; exit 4\n")
        terminal.wait_for(f"it is {SECOND}")
        assert terminal.ends() == 4


def test_plain_ssh_and_rsync_go_through_an_endpoint(behind: Behind, tmp_path: Path) -> None:
    """With the profile that gpuctl was run with, which the next terminal may not name."""
    profile = {name: value for name, value in behind.env.items() if name != "AWS_ACCESS_KEY_ID"}
    behind.env = {**profile, "AWS_PROFILE": "research"}
    behind.run("ssh", "--install-config")
    behind.run("exec", "--", "true")
    config = Path(behind.env["HOME"]) / ".ssh" / "config"
    (behind.work / "file").write_text("1")
    for command in (
        ("ssh", "-F", config, "default-1", "echo $GPUCTL_TEST_NODE"),
        *(
            [("rsync", "-e", f"ssh -F {config}", "file", f"default-1:{tmp_path}/there")]
            if shutil.which("rsync")
            else []
        ),
        ("scp", "-q", "-F", config, "file", f"default-{SECOND}:{tmp_path}/there too"),
    ):
        words = [str(word) for word in command]
        done = subprocess.run(words, env=profile, cwd=behind.work, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout == (f"{SECOND}\n" if words[0] == "ssh" else "")
    assert (tmp_path / "there too").read_text() == "1"
    assert not shutil.which("rsync") or (tmp_path / "there").read_text() == "1"
    assert behind.servers[FIRST].connections == 1, "only that of gpuctl exec"


@pytest.mark.slow
def test_a_public_node_is_no_way_in_for_one_behind_an_endpoint(behind: Behind) -> None:
    behind.boots("i-0aaaaaaaaaaaaaaaa", behind.servers[FIRST].host_key, address="10.77.0.9", public_address=PUBLIC)
    behind.beat("i-0aaaaaaaaaaaaaaaa", address="10.77.0.9", incarnation="3")
    assert behind.run("exec", SECOND, "--", "echo $GPUCTL_TEST_NODE").stdout == f"{SECOND}\n"
    for server, known in ((SECOND, True), ("i-0aaaaaaaaaaaaaaaa", False)):
        settings = settings_of(behind.home / "state/ssh/default.config", f"default-{server}")
        assert ("proxycommand" in settings) == known
        assert "proxyjump" not in settings


@pytest.mark.slow
def test_scp_goes_through_an_endpoint_too(behind: Behind, tmp_path: Path) -> None:
    """Where this machine has no rsync."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("ssh", "scp", "sh"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    behind.env["PATH"] = f"{behind.aws.folder}:{tools}"
    (behind.work / "file").write_text("1")
    behind.run("cp", "file", f"1:{tmp_path}/there")
    behind.run("cp", f"1:{tmp_path}/there", "back")
    assert (behind.work / "back").read_text() == "1"
    behind.aws.change(Account())
    done = behind.run("cp", "file", f"1:{tmp_path}/there", code=1)
    assert "through AWS's Instance Connect Endpoint: InvalidInstanceID.NotFound" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"may_tunnel": False},
            f"{NOT_REACHED}: User: arn:aws:iam::123456789012:user/ada is "
            "not authorized to perform: ec2-instance-connect:OpenTunnel; your AWS user needs",
        ),
        (
            {"may_describe": False},
            f"{NOT_REACHED}: UnauthorizedOperation: You are not authorized "
            "to perform this operation; your AWS user needs ec2-instance-connect:OpenTunnel, ec2:DescribeInstances",
        ),
        (
            {"has_endpoint": False},
            f"{NOT_REACHED}: There are no available instance connect endpoints; `gpuctl up --ssh-from me` creates one",
        ),
        (
            {"instances": {}},
            f"{NOT_REACHED}: InvalidInstanceID.NotFound",
        ),
        (
            {"instances": {FIRST: 1}},
            f"{NOT_REACHED}: Unable to connect to target; see",
        ),
        (
            {"is_new": False},
            f"the `aws` on this machine is too old to open a tunnel to {FIRST}; install AWS CLI v2: docs",
        ),
    ],
)
def test_a_tunnel_that_is_refused_is_one_line(behind: Behind, changes: dict[str, object], said: str) -> None:
    behind.aws.change(Account(**{"instances": behind.account.instances, **changes}))  # type: ignore[arg-type]
    for verb in (("exec", "--", "true"), ("ssh", "--", "true"), ("cp", "0:x", "x"), ("forward", "80")):
        done = behind.run(*verb, code=1)
        assert done.stderr.startswith(f"error: {said}"), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_without_credentials_the_tunnels_own_word_is_told(behind: Behind) -> None:
    del behind.env["AWS_ACCESS_KEY_ID"]
    said = behind.run("exec", "--", "true", code=1).stderr
    assert "Endpoint: Unable to locate credentials. You can configure" in said
    assert said.endswith("log in as for `gpuctl up`; AWS_PROFILE names a profile\n")
    assert said.count("\n") == 1


def test_without_the_aws_cli_it_is_said_what_to_install(behind: Behind, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").symlink_to(shutil.which("ssh") or "")
    behind.env["PATH"] = str(tools)
    said = behind.run("exec", "--", "true", code=1).stderr
    assert said == (
        f"error: {FIRST} has no public address and is reached with `aws`, which is not installed; install AWS "
        "CLI v2: docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html\n"
    )


def test_a_host_key_is_held_to_through_an_endpoint_too(behind: Behind) -> None:
    """AWS may be led to another machine by whoever writes the bucket, or holds the account."""
    other = behind.servers[SECOND].port
    behind.aws.change(Account(instances={FIRST: other}))
    said = behind.run("exec", "--", "true", code=1).stderr
    assert said.startswith(
        f"error: {FIRST} presents a different host key than the one in the bucket, so it was refused"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "bait", ["x; touch {}", "us-east-1; touch {}", "$(touch {})", "us-east-1\n    ProxyCommand touch {}"]
)
def test_what_the_bucket_says_runs_no_other_command(behind: Behind, tmp_path: Path, bait: str) -> None:
    caught = tmp_path / "caught"
    region = bait.format(caught)
    key = layout.boot_report(FIRST)
    report = decode(behind.store.get(key) or b"", BootReport, key)
    config = tmp_path / "state/ssh/default.config"
    for record in (msgspec.structs.replace(behind.spec, region=region), msgspec.structs.replace(report, zone=region)):
        behind.store.put(layout.CLUSTER if record.__class__ is ClusterSpec else key, encode(record))
        behind.run("exec", "no such node", "--", "true", code=2)
        assert "touch" not in config.with_suffix(".conf").read_text()
        connect = ("ssh", "-F", str(config), "-o", "ConnectTimeout=1", "default-0", "true")
        subprocess.run(connect, env=behind.env, capture_output=True, timeout=PATIENCE_S)
        behind.store.put(layout.CLUSTER, encode(behind.spec))
    assert not caught.exists()


@pytest.mark.parametrize("name", ["../../elsewhere", "a\nHost *\n    ProxyCommand touch caught", "*"])
def test_the_name_that_the_bucket_gives_a_cluster_leads_nowhere_else(behind: Behind, tmp_path: Path, name: str) -> None:
    behind.store.put(layout.CLUSTER, encode(msgspec.structs.replace(behind.spec, name=name)))
    before = set(tmp_path.rglob("*.conf"))
    said = behind.run("exec", "--", "true", code=2).stderr
    assert said.startswith("error: the cluster's record in the bucket calls it ")
    assert said.count("\n") == 1
    assert set(tmp_path.rglob("*.conf")) == before


def test_a_profile_reaches_the_tunnel_whatever_it_is_called(behind: Behind, tmp_path: Path) -> None:
    name = f"50% o'ff $(touch {tmp_path}/caught)"
    behind.aws.change(Account(instances=behind.account.instances, profiles=[name]))
    del behind.env["AWS_ACCESS_KEY_ID"]
    behind.env["AWS_PROFILE"] = name
    assert behind.run("exec", "--", "echo here").stdout == "here\n"
    assert behind.aws.calls()[-1][-2:] == ["--profile", name]
    assert not (tmp_path / "caught").exists()


# -- a tunnel that ends ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forward_opens_its_tunnel_again(behind: Behind, page_port: int) -> None:
    process = behind.start("forward", str(page_port))
    url = first_line(process)
    assert read(f"{url}/x") == "page /x"
    behind.aws.end_newest()
    assert process.stderr is not None
    lines = [process.stderr.readline().strip() for _ in range(3)]
    assert lines == ["Ctrl-C to stop", f"the tunnel to {FIRST} closed; opening another", "reconnected"]
    assert read(f"{url}/y") == "page /y"
    behind.aws.change(Account(instances={}))
    behind.aws.end_newest()
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (1, "")
    assert errors.splitlines()[-1].startswith(f"error: {NOT_REACHED}: InvalidInstanceID.NotFound")


def test_a_shell_whose_tunnel_ends_says_so_and_fails(behind: Behind) -> None:
    """In gpuctl's words where ssh was writing, in ssh's own where it was reading."""
    with Terminal(behind, "ssh", SECOND) as terminal:
        terminal.type("echo it is $GPUCTL_TEST_NODE''\n")
        terminal.wait_for(f"it is {SECOND}")
        behind.aws.end_newest()
        assert terminal.ends() in (1, 255)
        assert re.search(rf"connection to {SECOND} was|closed by remote host", terminal.seen)


# -- what the tests need -----------------------------------------------------------------------------------------------


def walk(cluster: Rented, node: str) -> None:
    """``exec``, ``ssh``, and ``cp`` there and back."""
    for verb in ("exec", "ssh"):
        said = cluster.run(verb, node, "--", "echo $GPUCTL_TEST_NODE; exit 7", code=7)
        assert (said.stdout, said.stderr) == (f"{node}\n", "")
    there = cluster.home / "on the node"
    (cluster.work / "tree").mkdir()
    (cluster.work / "tree" / "a file").write_text("1")
    cluster.run("cp", "tree", f"{node}:{there}/")
    assert (there / "tree" / "a file").read_text() == "1"
    cluster.run("cp", f"{node}:{there}/tree/a file", "back")
    assert (cluster.work / "back").read_text() == "1"
