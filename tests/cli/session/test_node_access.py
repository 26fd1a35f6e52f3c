"""``gpuctl ssh``, ``exec``, ``cp`` and ``forward`` against real sshds on loopback."""

from __future__ import annotations

import http.server
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import BootReport, SshHost
from gpuctl.stacks.ssh import config as ssh_config
from gpuctl.stacks.ssh.hosts import read_hosts
from tests.cli.test_main import HEAVY, modules_of
from tests.fakes import sshd
from tests.fakes.sshd import Sshd
from tests.fakes.written_cluster import WrittenCluster
from tests.waiting import until

PATIENCE_S = 30


class Lab(WrittenCluster):
    """A cluster whose nodes are sshds here; ``node-0`` is rank 0."""

    def __init__(self, home: Path, url: str, stack: ExitStack) -> None:
        super().__init__(home, url, provider="ssh")
        self.env["HOME"] = str(home / "home")
        (home / "home").mkdir()
        self.identity = sshd.make_key(home / "id") if sshd.SSHD else None
        self.servers: dict[str, Sshd] = {}
        self._stack = stack

    def serve(self, node: str, env: dict[str, str] | None = None) -> None:
        """``node`` is reached by a new sshd, whose sessions have ``env``."""
        folder = self.home / f"sshd-{node}-{len(list(self.home.iterdir()))}"
        env = {"GPUCTL_TEST_NODE": node, **(env or {})}
        self.add(node, self._stack.enter_context(sshd.serving(folder, identity=self.identity, env=env)))

    def add(self, node: str, server: Sshd, **fields: object) -> None:
        """``node`` is the machine behind ``server``."""
        self.servers[node] = server
        about = SshHost(
            node=node,
            target=node,
            host="127.0.0.1",
            port=server.port,
            user=server.user,
            identities=(str(server.identity),),
            host_keys=(server.host_key,),
        )
        self.store.put(layout.ssh_host(node), encode(msgspec.structs.replace(about, **fields)))


@pytest.fixture
def lab(tmp_path: Path, file_url: str) -> Iterator[Lab]:
    with ExitStack() as stack:
        made = Lab(tmp_path, file_url, stack)
        for node in ("node-0", "node-1"):
            made.serve(node)
        made.beat("node-1")
        made.lead("node-0")
        yield made


# -- exec --------------------------------------------------------------------------------------------------------------


def test_exec_runs_on_rank_0_and_returns_its_exit_code(lab: Lab) -> None:
    done = lab.run("exec", "--", "echo $GPUCTL_TEST_NODE; echo oh >&2; exit 7", code=7)
    assert (done.stdout, done.stderr) == ("node-0\n", "oh\n")


def test_several_words_reach_the_program_as_they_are(lab: Lab) -> None:
    done = lab.run("exec", "1", "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "a  b", "$HOME", "--all")
    assert done.stdout == "['a  b', '$HOME', '--all']\n"


def test_exec_loads_nothing_heavy(lab: Lab) -> None:
    code, modules = modules_of(["exec", "--", "true"], lab)
    assert code == 0
    assert not {module for module in modules if module.startswith((*HEAVY, "rich", "psutil"))}


def test_exec_hands_on_standard_input(lab: Lab) -> None:
    process = lab.start("exec", "--", "cat")
    assert process.wait(PATIENCE_S) == 0  # it is /dev/null, and not a wait for ever


@pytest.mark.parametrize(
    ("line", "code", "failed"), [("true", 0, ""), ("[ $GPUCTL_TEST_NODE = node-0 ] || exit 3", 3, "node-1 (exit 3)")]
)
def test_exec_on_all_names_each_node_and_ends_as_the_first_that_failed(
    lab: Lab, line: str, code: int, failed: str
) -> None:
    done = lab.run("exec", "--all", "--", f"echo I am $GPUCTL_TEST_NODE; {line}", code=code)
    assert sorted(done.stdout.splitlines()) == ["node-0 | I am node-0", "node-1 | I am node-1"]
    assert done.stderr == (f"failed: {failed}\n" if failed else "")


def test_exec_on_all_goes_on_without_a_node_that_cannot_be_reached(lab: Lab) -> None:
    lab.add("node-0", lab.servers["node-0"], port=closed_port())
    done = lab.run("exec", "--all", "--", "echo here", code=255)
    assert done.stdout == "node-1 | here\n"
    assert "error: cannot reach node-0 at 127.0.0.1: Connection refused" in done.stderr
    assert "failed: node-0 (not reached)" in done.stderr


def test_exec_on_all_leaves_out_what_takes_no_part(lab: Lab) -> None:
    lab.lead("node-0", view={"node-0": "live", "node-1": "lost"}, incarnation="another")
    lab.store.put(layout.boot_report("node-2"), encode(BootReport(node="node-2", state="failed", address="10.0.0.2")))
    done = lab.run("exec", "--all", "--", "echo here")
    assert done.stdout == "node-0 | here\n"
    assert done.stderr.splitlines() == [
        "node-1: skipped, it is not in the cluster",
        "node-2: skipped, it is not in the cluster",
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["exec", "node-7", "--", "true"], "unknown node 'node-7'; there are: 0 node-0, 1 node-1"),
        (["exec", "2", "--", "true"], "unknown node '2'; there are: 0 node-0, 1 node-1"),
        (["exec", "node-0"], "no command; give one after `--`; for example: gpuctl exec --all -- nvidia-smi"),
        (["exec", "--all", "node-0", "--", "true"], "--all and node-0 exclude each other; leave one of them out"),
        (["ssh", "--tmux"], "--tmux needs a terminal; leave it out, or use `gpuctl exec`"),
        (["cp", "a", "b"], "a to b: neither end is on a node; write one end as NODE:PATH, such as 0:results"),
        (["cp", "0:a", "1:b"], "0:a to 1:b: both ends are on nodes; write one end as NODE:PATH, such as 0:results"),
        (["cp", "nothing", "0:"], "nothing does not exist on this machine; check SRC"),
        (["forward", "http"], "'http' is not a port; use one from 1 to 65535, or tensorboard"),
        (["forward", "tensorboard"], "no job has been started on this cluster"),
    ],
)
def test_bad_input_is_one_line(lab: Lab, args: list[str], said: str) -> None:
    done = lab.run(*args, code=2)
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exec_on_all_ends_its_programs_when_it_is_ended(lab: Lab, number: signal.Signals, code: int) -> None:
    process = lab.start("exec", "--all", "--", "while echo $$; do sleep 0.05; done")
    assert process.stdout is not None
    programs: dict[str, int] = {}
    while len(programs) < 2:
        node, _, pid = process.stdout.readline().partition(" | ")
        programs[node] = int(pid)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    until(lambda: not any(map(psutil.pid_exists, programs.values())), "its programs go on")


@pytest.fixture
def left_behind(lab: Lab) -> Iterator[Callable[[], bool]]:
    """ssh and scp leave a process behind that holds their error stream, as a shared connection's ProxyCommand does.
    Called: whether there are such, and all of them still run."""
    tools, pids = lab.home / "tools", lab.home / "left"
    tools.mkdir()
    for name in ("ssh", "scp"):
        script = f'#!/bin/sh\nsleep 10 >&2 &\necho $! >>{pids}\nexec {shutil.which(name)} "$@"\n'
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    lab.env["PATH"] = f"{tools}:{lab.env['PATH']}"

    def running() -> list[psutil.Process]:
        left = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
        found = [psutil.Process(pid) for pid in left if psutil.pid_exists(pid)]
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    yield lambda: 0 < len(running()) == len(pids.read_text().split())
    for process in running():
        process.kill()


def test_exec_on_all_ends_when_ssh_does_whoever_holds_its_pipes(lab: Lab, left_behind: Callable[[], bool]) -> None:
    done = lab.run("exec", "--all", "--", "printf 'one\\ntwo'; echo oh >&2; exit 3", code=3)
    assert left_behind()
    assert sorted(done.stdout.splitlines()) == [f"node-{n} | {word}" for n in (0, 1) for word in ("one", "two")]
    assert sorted(done.stderr.splitlines()[:-1]) == ["node-0 | oh", "node-1 | oh"]


@pytest.mark.parametrize("tool", ["rsync", "scp"])
def test_a_copy_ends_when_its_program_does_whoever_holds_its_pipes(
    lab: Lab, left_behind: Callable[[], bool], tool: str
) -> None:
    if not shutil.which(tool):
        pytest.skip(f"no {tool} here")
    if tool == "scp":
        (lab.home / "tools" / "rsync").write_text("#!/bin/sh\necho an old one\n")
        (lab.home / "tools" / "rsync").chmod(0o755)
    (lab.work / "file").write_text("1")
    lab.run("cp", "file", f"0:{lab.home}/there")
    assert left_behind()
    assert (lab.home / "there").read_text() == "1"


# -- one connection for several commands -------------------------------------------------------------------------------


@pytest.fixture
def sharing(lab: Lab) -> Iterator[Lab]:
    """In a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="gpuctl-") as folder:
        lab.env["GPUCTL_STATE_DIR"] = folder
        shutil.copytree(lab.home / "state", folder, dirs_exist_ok=True)
        yield lab


@pytest.mark.slow
def test_commands_share_a_connection(sharing: Lab, tmp_path: Path) -> None:
    for word in ("one", "two"):
        assert sharing.run("exec", "--", f"echo {word}; echo oh >&2; exit 3", code=3).stdout == f"{word}\n"
    (tmp_path / "given").write_text("given")
    sharing.run("cp", str(tmp_path / "given"), f"0:{tmp_path}/taken")
    assert (tmp_path / "taken").read_text() == "given"
    assert sharing.servers["node-0"].connections == 1


@pytest.mark.slow
def test_a_forward_has_its_own_connection(sharing: Lab, page_port: int) -> None:
    sharing.run("exec", "--", "true")
    process = sharing.start("forward", str(page_port))
    assert read(f"{first_line(process)}/x") == "page /x"
    assert sharing.servers["node-0"].connections == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_an_open_connection_proves_no_other_host_key(sharing: Lab) -> None:
    sharing.run("exec", "--", "true")
    sharing.add("node-0", sharing.servers["node-0"], host_keys=(sharing.servers["node-1"].host_key,))
    assert "presents a different host key" in sharing.run("exec", "--", "true", code=1).stderr


def test_a_shared_connection_that_was_cut_is_replaced(sharing: Lab) -> None:
    sharing.run("exec", "--", "true")
    sharing.servers["node-0"].cut()
    sharing.run("exec", "--", "true")
    assert sharing.servers["node-0"].connections == 2


# -- who it is ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [("ssh", "0", "--", "true"), ("exec", "0", "--", "true"), ("cp", "0:x", "x"), ("forward", "80")]
)
def test_a_changed_host_key_is_refused_in_one_line(lab: Lab, args: tuple[str, ...]) -> None:
    lab.add("node-0", lab.servers["node-0"], host_keys=(lab.servers["node-1"].host_key,))
    done = lab.run(*args, code=1)
    assert done.stderr == (
        "error: node-0 presents a different host key than the one in the bucket, so it was refused; "
        "the connection may be intercepted, or the machine was reinstalled: find out which\n"
    )


def test_a_host_key_that_nobody_pinned_is_not_learnt(lab: Lab) -> None:
    lab.add("node-0", lab.servers["node-0"], host_keys=())
    for _ in range(2):
        done = lab.run("exec", "--", "true", code=1)
        assert done.stderr == (
            "error: the bucket has no host key of node-0, so it was refused; see `gpuctl logs --boot node-0`\n"
        )


def test_a_key_that_may_not_log_in_is_said(lab: Lab, tmp_path: Path) -> None:
    lab.add("node-0", lab.servers["node-0"], identities=(str(sshd.make_key(tmp_path / "other")),))
    done = lab.run("ssh", "--", "true", code=1)
    assert done.stderr.startswith(f"error: {lab.servers['node-0'].user} on node-0 accepts none of the keys")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_the_bucket_says_cannot_become_a_setting_of_ssh(lab: Lab, tmp_path: Path) -> None:
    """Whoever writes the bucket may run code on nodes, and not here."""
    bait = f"127.0.0.1\n    ProxyCommand touch {tmp_path}/caught"
    for fields in ({"host": bait}, {"user": bait}, {"jump": bait}, {"identities": (bait,)}, {"host_keys": (bait,)}):
        lab.add("node-0", lab.servers["node-0"], **fields)
        process = lab.start("exec", "--", "true")
        process.communicate(timeout=PATIENCE_S)
        assert "ProxyCommand" not in (tmp_path / "state/ssh/default.conf").read_text()
    assert not (tmp_path / "caught").exists()


# -- plain ssh ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plain_ssh_reaches_the_nodes_after_one_line_in_its_configuration(lab: Lab) -> None:
    config = Path(lab.env["HOME"]) / ".ssh" / "config"
    config.parent.mkdir(mode=0o700)
    config.write_text("Host *\n    User nobody-else\n")
    config.chmod(0o640)
    assert "one line added" in lab.run("ssh", "--install-config").stdout
    assert "already has that line" in lab.run("ssh", "--install-config").stdout
    lines = config.read_text().splitlines()
    assert [line for line in lines if line.startswith("Include")] == [lines[1]]
    assert lines[-2:] == ["Host *", "    User nobody-else"]
    assert config.stat().st_mode & 0o777 == 0o640
    lab.run("exec", "--", "true")
    for name in ("default-1", "default-node-1"):
        said = subprocess.run(
            ("ssh", "-F", str(config), name, "echo $GPUCTL_TEST_NODE"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert said.stdout == "node-1\n"


@pytest.mark.slow
def test_no_configuration_is_changed_for_nodes_without_an_sshd(written: WrittenCluster) -> None:
    written.env["HOME"] = str(written.home)
    for named in ((), ("--bucket", written.store.url)):
        said = written.run("ssh", "--install-config", *named, code=2).stderr
        assert said == "error: the nodes of default run on this machine, without an sshd; use `gpuctl exec`\n"
    said = written.run("ssh", "--install-config", "-c", "elsewhere", code=2).stderr
    assert said.startswith("error: ") and "'elsewhere'" in said and len(said.splitlines()) == 1
    assert not (written.home / ".ssh").exists()


def test_ssh_itself_reads_the_configuration_as_it_was_meant(lab: Lab, tmp_path: Path) -> None:
    lab.run("exec", "--", "true")
    meant = settings_of(tmp_path / "state/ssh/default.config", "default-0")
    server = lab.servers["node-0"]
    assert meant["hostname"] == "127.0.0.1"
    assert meant["port"] == str(server.port)
    assert meant["user"] == server.user
    assert meant["stricthostkeychecking"] == "true"
    assert meant["globalknownhostsfile"] == "/dev/null"
    assert meant["hostkeyalias"] == "gpuctl-default-node-0"
    assert meant["userknownhostsfile"] == str(tmp_path / "state/ssh/default.known_hosts")
    assert meant["identityfile"] == str(server.identity)
    for path in (tmp_path / "state/ssh").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_node_without_a_public_address_is_reached_through_one_that_has_one(tmp_path: Path, file_url: str) -> None:
    written = WrittenCluster(tmp_path, file_url, provider="gcp")
    report = partial(BootReport, state="ready", user="ubuntu", host_keys=("ssh-ed25519 AAAA",))
    written.store.put(layout.boot_report("node-0"), encode(report(node="node-0", address="10.0.0.1")))
    written.store.put(
        layout.boot_report("node-1"), encode(report(node="node-1", address="10.0.0.2", public_address="203.0.113.9"))
    )
    written.beat("node-1")
    written.lead("node-0")
    written.run("ssh", "node-9", code=2)
    config = tmp_path / "state/ssh/default.config"
    assert settings_of(config, "default-0")["hostname"] == "10.0.0.1"
    assert settings_of(config, "default-0")["proxyjump"] == "default-node-1"
    assert settings_of(config, "default-1")["hostname"] == "203.0.113.9"
    assert "proxyjump" not in settings_of(config, "default-1")


def test_the_way_to_a_node_leads_through_another_one(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", lab.env["GPUCTL_STATE_DIR"])
    monkeypatch.setenv("HOME", lab.env["HOME"])
    hosts = [replace(host, is_public=host.node == "node-1") for host in read_hosts(lab.store)]
    command = ("ssh", "-F", str(ssh_config.write("default", hosts)), "default-0", "echo $GPUCTL_TEST_NODE")
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert said.stdout == "node-0\n"
    assert {node: server.connections for node, server in lab.servers.items()} == {"node-0": 1, "node-1": 1}


# -- ssh ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ssh_gives_a_terminal_to_a_person(lab: Lab) -> None:
    with Terminal(lab, "ssh", "node-1") as terminal:
        terminal.type("test -t 0 && echo it is $GPUCTL_TEST_NODE''; exit 4\n")
        terminal.wait_for("it is node-1")
        assert terminal.ends() == 4


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tmux"), reason="no tmux here: apt-get install tmux")
def test_tmux_goes_on_when_the_connection_ends(lab: Lab, tmp_path: Path) -> None:
    lab.serve("node-0", {"TMUX_TMPDIR": str(tmp_path), "TERM": "xterm"})
    tmux = ("tmux", "-S", str(tmp_path / f"tmux-{os.getuid()}/default"))
    try:
        with Terminal(lab, "ssh", "--tmux") as terminal:
            terminal.type("echo left''over\n")
            terminal.wait_for("leftover")
        with Terminal(lab, "ssh", "--tmux") as terminal:
            terminal.wait_for("leftover")
        names = subprocess.run(
            (*tmux, "list-sessions", "-F", "#S"), capture_output=True, text=True, check=True, timeout=10
        )
        assert names.stdout == "gpuctl\n"
    finally:
        subprocess.run((*tmux, "kill-server"), check=False, timeout=10, capture_output=True)


@pytest.mark.slow
def test_a_node_without_tmux_is_said(lab: Lab, tmp_path: Path) -> None:
    lab.serve("node-0", {"PATH": str(tmp_path)})
    with Terminal(lab, "ssh", "--tmux") as terminal:
        terminal.wait_for("error: tmux is not installed on node-0; install it: gpuctl exec node-0 --")
        assert terminal.ends() == 1


# -- cp ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["rsync", "scp"])
def copying(request: pytest.FixtureRequest, lab: Lab, tmp_path: Path) -> Lab:
    """With rsync on both sides, and with a node that has none."""
    if request.param == "rsync" and not shutil.which("rsync"):
        pytest.skip("no rsync here: apt-get install rsync")
    if request.param == "scp":
        tools = tmp_path / "tools"
        tools.mkdir()
        for tool in ("mkdir", "test", "sh"):
            (tools / tool).symlink_to(shutil.which(tool) or "")
        lab.serve("node-1", {"PATH": str(tools)})
    tree = lab.work / "a tree"
    (tree / "in").mkdir(parents=True)
    (tree / "one").write_text("1")
    (tree / "in" / "two $HOME").write_text("2")
    (tree / "one").chmod(0o755)
    return lab


@pytest.mark.slow
def test_a_folder_goes_to_a_node_and_comes_back_the_same(copying: Lab, tmp_path: Path) -> None:
    there = tmp_path / "on the node"
    there.mkdir()
    copying.run("cp", "a tree", f"node-1:{there}")
    assert tree_of(there) == {"a tree/one": ("1", 0o755), "a tree/in/two $HOME": ("2", 0o644)}
    copying.run("cp", f"1:{there}/a tree/", "back")
    assert tree_of(copying.work / "back") == tree_of(copying.work / "a tree")
    copying.run("cp", f"1:{there}/a tree", "again")
    assert tree_of(copying.work / "again") == tree_of(there)


def test_a_file_goes_to_a_node_and_comes_back(copying: Lab, tmp_path: Path) -> None:
    copying.run("cp", "a tree/one", f"node-1:{tmp_path}/there")
    assert (tmp_path / "there").read_text() == "1"
    copying.run("cp", f"node-1:{tmp_path}/there", "back")
    assert (copying.work / "back").read_text() == "1"


@pytest.mark.slow
def test_a_copy_that_fails_says_why_and_fails(copying: Lab, tmp_path: Path) -> None:
    said = copying.run("cp", f"node-1:{tmp_path}/nothing", "back", code=1).stderr.splitlines()
    assert said[-1].startswith("error: ")
    assert "No such file" in said[-1]
    assert not (copying.work / "back").exists()


# -- forward -----------------------------------------------------------------------------------------------------------


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"page {self.path}".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page_port() -> Iterator[int]:
    """Of a web server."""
    with http.server.ThreadingHTTPServer(("localhost", 0), _Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.slow
def test_a_port_of_a_node_is_reached_here_until_ctrl_c(lab: Lab, page_port: int) -> None:
    process = lab.start("forward", str(page_port), "--node", "1")
    url = first_line(process)
    assert url != f"http://127.0.0.1:{page_port}", "that one is taken: the node is this very machine"
    assert read(f"{url}/x") == "page /x"
    before = lab.servers["node-1"].connections
    assert read(f"{url}/y") == "page /y"
    assert lab.servers["node-1"].connections == before == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    lab.servers["node-1"].wait_until_all_left()


def test_the_same_port_is_taken_here_if_it_is_free(lab: Lab) -> None:
    """Nothing listens on it on the node, which is this machine, so it is free here."""
    port = closed_port()
    process = lab.start("forward", str(port))
    assert first_line(process) == f"http://127.0.0.1:{port}"
    process.terminate()
    process.communicate(timeout=PATIENCE_S)


def test_a_forward_whose_connection_breaks_ends_and_says_so(lab: Lab, page_port: int) -> None:
    process = lab.start("forward", str(page_port))
    first_line(process)
    lab.servers["node-0"].cut()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "error: " in said
    assert "node-0" in said.splitlines()[-1]


# -- local -------------------------------------------------------------------------------------------------------------


def test_on_local_nodes_a_port_is_here_already(written: WrittenCluster) -> None:
    written.lead("node-0")
    done = written.run("forward", "8000", code=1)
    assert "node-0 does not run on this machine; none runs here; `gpuctl up` starts what has ended" in done.stderr


# -- what the tests need -----------------------------------------------------------------------------------------------


class Terminal:
    """``gpuctl args`` on a terminal of its own, as a person has it."""

    def __init__(self, lab: WrittenCluster, *args: str) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(lab.work)
            command = [sys.executable, "-m", "gpuctl.cli.main", *args]
            os.execve(sys.executable, command, {**lab.env, "TERM": "xterm"})
        self.seen = ""
        self._code: int | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)  # as a window that is closed: SIGHUP
        if self._code is None:
            self._reap()

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self.seen):
            is_open = self._read()
            assert is_open and time.monotonic() < deadline, f"waited in vain for {text!r} in {self.seen!r}"

    def ends(self) -> int:
        """Its exit code. All that it has shown by then is in ``seen``."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._has_ended() and time.monotonic() < deadline:
            self._read()
        self._reap()
        while select.select([self._fd], [], [], 0)[0] and self._read():
            pass
        assert self._code is not None
        return self._code

    def _read(self) -> bool:
        """Whether there may be more."""
        if select.select([self._fd], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                return False
        return True

    def _reap(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._has_ended():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.02)

    def _has_ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None


def settings_of(config: Path, name: str) -> dict[str, str]:
    """What real ssh makes of ``config``."""
    if not shutil.which("ssh"):
        pytest.skip("no ssh here: apt-get install openssh-client")
    command = ("ssh", "-G", "-F", str(config), name)
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in reversed(said.splitlines())}


def tree_of(folder: Path) -> dict[str, tuple[str, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_text(), path.stat().st_mode & 0o777) for path in files}


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise AssertionError(process.communicate(timeout=PATIENCE_S)[1])
    return line


def read(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
        return text


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
