"""The agent as its machine starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest

from gpuctl.bootstrap.boot.idle import IdleCheck
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cli.session.job_upload import send_folder
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.fakes.faults import Fault, Proxy
from tests.fakes.nvml import Driver
from tests.fakes.stores import s3
from tests.fakes.unkillable import held
from tests.waiting import until

_AGENT = """
    import signal, sys
    from pathlib import Path
    import msgspec
    from gpuctl.bootstrap.agent.agent import Agent
    from gpuctl.bootstrap.identity import NodeIdentity
    from gpuctl.bootstrap.agent.host_files import MOST_WAIT_S
    from gpuctl.cluster.clock import SystemClock

    class Clock(SystemClock):
        ahead_s = 0.0

        def monotonic(self):
            return super().monotonic() + self.ahead_s

        def leap(self, *_):
            self.ahead_s += MOST_WAIT_S

    clock = Clock()
    signal.signal(signal.SIGUSR1, clock.leap)
    folder = Path(sys.argv[1])
    Agent(folder, msgspec.json.decode((folder / "identity.json").read_bytes(), type=NodeIdentity), clock).serve()
"""
_WORKS = """
    import sys, time
    from pathlib import Path

    here = Path(sys.argv[1])
    (here / "begun").touch()
    while not (here / "go").exists():
        time.sleep(0.05)
    (here / "over").touch()
"""
_HANGS = """
    import sys, time
    from pathlib import Path

    (Path(sys.argv[1]) / "begun").touch()
    time.sleep(1e6)
"""
_SAVES = """
    import os, signal, sys, time
    from pathlib import Path

    here = Path(sys.argv[1])
    (here / "launcher").write_text(str(os.getppid()))

    def save(*_):
        (here / "saves").touch()
        while not (here / "go").exists():
            time.sleep(0.02)
        sys.exit()

    signal.signal(signal.SIGTERM, save)
    (here / "begun").touch()
    time.sleep(1e6)
"""


def test_an_agent_without_a_cluster_names_the_bucket_and_not_its_keys(tmp_path: Path, s3_url: str) -> None:
    """What it says goes to the journal, and from there into the bucket."""
    assert "secret_access_key=" in s3_url, "the test is about the keys"
    identity = NodeIdentity(node="node-0", address="127.0.0.1", bucket=s3_url)
    (tmp_path / "identity.json").write_bytes(msgspec.json.encode(identity))
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl.bootstrap.agent", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert said.endswith(f": no cluster found at {s3_url.partition('?')[0]}; create it with `gpuctl up`\n")
    assert "access_key" not in said


def test_a_log_that_takes_nothing_ends_no_agent() -> None:
    """It is on the disk that may be full, and what is said then is said where an error has just been survived."""
    lines = "from gpuctl.bootstrap.agent.agent import say; import sys; say('a'); say('b'); sys.stderr.write('goes on')"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", lines], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr.startswith("goes on"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", [_WORKS, _HANGS], ids=["over", "stalled"])
def test_a_machine_whose_bucket_is_gone_for_good_is_idle_some_time_after_its_job_is_over(
    script: str, tmp_path: Path, s3_endpoint: str
) -> None:
    """Else it is paid for for ever: nobody can tell that the job has ended, but the workers have."""
    root, here, log = tmp_path / "root", tmp_path / "node", tmp_path / "agent.log"
    (root / "proc").mkdir(parents=True)
    (root / "var/lib/gpuctl/boot").mkdir(parents=True)
    (root / "var/lib/gpuctl/boot/agent.done").touch()
    here.mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code/job.py").write_text(dedent(script))
    name = f"gone-{uuid.uuid4().hex}"
    s3.create(s3_endpoint, name)
    store = open_bucket(s3.url(s3_endpoint, name))
    spec = ClusterSpec(
        name="c", provider="ssh", nodes_min=1, nodes_max=1, slots=1, token="t", heartbeat_s=0.2, stall_minutes=0.05
    )
    store.put(layout.CLUSTER, encode(spec))
    code = send_folder(store, tmp_path / "code", "job.py")
    queue.submit(store, spec, queue.JobRequest(script="job.py", args=(str(tmp_path),), code=code))
    with Proxy(s3_endpoint).running() as proxy:
        bucket = s3.url(proxy.url, name)
        identity = NodeIdentity(node="n", address="127.0.0.1", bucket=bucket, provider="ssh", root=str(root))
        (here / "identity.json").write_bytes(msgspec.json.encode(identity))
        with _agent(here, log) as agent:
            until(lambda: (tmp_path / "begun").exists(), "the job to begin")
            for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
                proxy.plan("refuse", method, times=1_000_000, status=404, code="NoSuchBucket")
            (tmp_path / "go").touch()
            if script is _WORKS:
                until(lambda: (tmp_path / "over").exists(), "the job to end")
            else:
                until(lambda: "stalled: no step" in log.read_text(), "the job to count as stalled")
            # So much longer than a turn of the agent that it would be seen to be busy.
            watch = IdleCheck(root, 4.0, lambda: 0.0)

            def is_over() -> bool:
                watch.look(time.monotonic())
                agent.send_signal(signal.SIGUSR1)  # half an hour passes
                return watch.is_over()

            until(is_over, "the machine to be idle")


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["it saves", "it hangs"])
def test_a_machine_whose_gpu_is_ill_may_be_replaced_once_its_job_has_saved_or_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    root, here, driver = tmp_path / "root", tmp_path / "node", Driver(tmp_path)
    smi = tmp_path / "bin" / "nvidia-smi"
    for folder in (here, smi.parent, tmp_path / "code"):
        folder.mkdir()
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-0)'\n")
    smi.chmod(0o755)
    for name, value in driver.env({**os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "code/job.py").write_text(dedent(_SAVES))
    store = open_bucket(f"file://{tmp_path}/bucket")
    spec = ClusterSpec(name="c", provider="ssh", nodes_min=1, nodes_max=1, slots=1, token="t", heartbeat_s=0.2)
    store.put(layout.CLUSTER, encode(spec))
    identity = NodeIdentity(node="n", address="127.0.0.1", bucket=store.url, provider="ssh", root=str(root))
    (here / "identity.json").write_bytes(msgspec.json.encode(identity))
    code = send_folder(store, tmp_path / "code", "job.py")
    queue.submit(store, spec, queue.JobRequest(script="job.py", args=(str(tmp_path),), code=code))
    ill = root / "run/gpuctl/ill"
    with _agent(here, tmp_path / "agent.log") as agent, ExitStack() as hanging:
        until(lambda: (tmp_path / "begun").exists(), "the job to begin")
        if hangs:
            hanging.enter_context(held(int((tmp_path / "launcher").read_text())))
        driver.say("xid 0 79")
        until((tmp_path / "saves").exists, "the job to save")
        for _ in range(8):  # of the agent's turns
            beat = store.get(layout.node("n"))
            until(lambda beat=beat: store.get(layout.node("n")) != beat, "a heartbeat")  # type: ignore[misc]
        assert not ill.exists(), "its job has not saved yet"
        if hangs:
            agent.send_signal(signal.SIGUSR1)  # half an hour passes: it is killed, and nobody sees its end
        else:
            (tmp_path / "go").touch()
        until(ill.exists, "the word that it may be replaced")
        assert ill.read_text() == "GPU 0: it has fallen off the bus (Xid 79)"


@pytest.mark.slow
def test_an_exit_that_the_bucket_does_not_take_at_once_is_sent_again_and_waited_for(
    tmp_path: Path, s3_endpoint: str
) -> None:
    """Else the round never ends: a node that is told to leave leaves once its exit is known, and no sooner."""
    with _at_work(tmp_path, s3_endpoint) as node:
        refused = node.proxy.plan("refuse", "PUT", r"/exits/", times=1000, status=403, code="AccessDenied")
        (tmp_path / "go").touch()
        assert refused.met.wait(60)
        node.is_told_to_leave()
        node.keeps_trying(refused)
        node.proxy.heal()
        assert node.agent.wait(60) == 0
        assert node.exits(), ledgers.rounds(node.bucket, node.job).read().value


@pytest.mark.slow
def test_an_exit_of_a_round_that_is_over_is_recorded_all_the_same(tmp_path: Path, s3_endpoint: str) -> None:
    """The job has ended without it, so nobody waits for it; but it is all that tells how far this node came."""
    with _at_work(tmp_path, s3_endpoint) as node:
        queue.ask_to_cancel(node.bucket, node.job, now=True)
        until(lambda: _phase(node) == "ended", "the job to end")
        until(node.exits, "the exit")


@pytest.mark.slow
def test_a_node_leaves_once_the_exit_of_a_round_that_is_over_is_out(tmp_path: Path, s3_endpoint: str) -> None:
    with _at_work(tmp_path, s3_endpoint) as node:
        refused = node.proxy.plan("refuse", "PUT", r"/exits/", times=1000, status=403, code="AccessDenied")
        queue.ask_to_cancel(node.bucket, node.job, now=True)
        assert refused.met.wait(60)
        node.is_told_to_leave()
        node.keeps_trying(refused)
        node.proxy.heal()
        assert node.agent.wait(60) == 0
        assert node.exits()
    told = {path.name for path in (tmp_path / "root/run/gpuctl").iterdir()}
    assert told == {"busy", "rank0.json"}, "a SIGTERM says nothing of the machine: its own watch is to take it away"


@pytest.mark.slow
def test_a_beat_that_is_on_its_way_when_the_node_leaves_does_not_bring_it_back(
    tmp_path: Path, s3_endpoint: str
) -> None:
    with _at_work(tmp_path, s3_endpoint) as node:
        refused = node.proxy.plan("refuse", "PUT", r"/exits/", times=1000, status=403, code="AccessDenied")
        queue.ask_to_cancel(node.bucket, node.job, now=True)
        assert refused.met.wait(60)
        node.is_told_to_leave()  # and does not yet, for its exit's sake
        beat = node.proxy.plan("hold", "PUT", r"/nodes/")
        rubbed_out = node.proxy.plan("land-hold", "POST", r"\?delete", strike=beat.gate.set)
        rubbed_out.gate.set()
        assert beat.met.wait(60)
        refused.times = 0
        until(lambda: "leaving" in node.log.read_text(), "the node to leave")
        rubbed_out.met.wait(0.5)  # it must not be while the beat is on its way
        beat.gate.set()
        assert node.agent.wait(60) == 0
        assert beat.over.wait(60)
        assert rubbed_out.met.is_set(), "else the test is about nothing"
        assert node.bucket.get(layout.node("n")) is None


@pytest.mark.slow
def test_an_agent_that_cannot_look_at_the_bucket_does_not_look_alive(tmp_path: Path, s3_endpoint: str) -> None:
    """Its heartbeat could still be written; but whoever waits for what it decides would wait for ever."""
    with _at_work(tmp_path, s3_endpoint) as node:
        begun = len(node.proxy.seen)
        node.proxy.plan("refuse", "GET", times=100_000, status=403, code="AccessDenied")

        def is_silent() -> bool:
            seen = [line for line in node.proxy.seen[begun:] if line.startswith("GET ") or _is_beat(line)]
            told = "".join("!" if _is_beat(line) else "?" for line in seen)
            assert len(told) < 200, f"its heart beats on: {told}"
            return told.endswith(8 * "?")  # as many looks as there would be heartbeats

        until(is_silent, "its heart to stop")
        node.proxy.heal()
        until(lambda: _is_beat(node.proxy.seen[-1]), "a heartbeat")


@dataclass(frozen=True)
class _Node:
    agent: subprocess.Popen[bytes]
    proxy: Proxy
    """Between the agent and its bucket."""
    bucket: Bucket
    job: str
    log: Path

    def is_told_to_leave(self) -> None:
        self.agent.send_signal(signal.SIGTERM)
        until(lambda: b'"notice"' in (self.bucket.get(layout.node("n")) or b""), "the notice to be told")

    def keeps_trying(self, refused: Fault) -> None:
        """For three turns of the agent's loop."""
        for _ in range(3):
            refused.met.clear()
            until(lambda: refused.met.is_set() or self.agent.poll() is not None, "another try")
            assert self.agent.poll() is None, self.log.read_text()

    def exits(self) -> list[str]:
        return [entry.key for entry in self.bucket.list(f"jobs/{self.job}/exits")]


def _is_beat(request: str) -> bool:
    return re.match(r"PUT .*/nodes/", request) is not None


def _phase(node: _Node) -> str:
    found = ledgers.rounds(node.bucket, node.job).read().value
    return found.phase if found else "wait"


@contextmanager
def _at_work(folder: Path, s3_endpoint: str) -> Iterator[_Node]:
    """A node whose only job waits for the file ``go``."""
    here, log = folder / "node", folder / "agent.log"
    here.mkdir()
    (folder / "code").mkdir()
    (folder / "code/job.py").write_text(dedent(_WORKS))
    name = f"exits-{uuid.uuid4().hex}"
    s3.create(s3_endpoint, name)
    direct = open_bucket(s3.url(s3_endpoint, name))
    spec = ClusterSpec(name="c", provider="local", nodes_min=1, nodes_max=1, slots=1, token="t", heartbeat_s=0.2)
    direct.put(layout.CLUSTER, encode(spec))
    with Proxy(s3_endpoint).running() as proxy:
        bucket, root = s3.url(proxy.url, name), str(folder / "root")
        identity = NodeIdentity(node="n", address="127.0.0.1", bucket=bucket, provider="ssh", root=root)
        (here / "identity.json").write_bytes(msgspec.json.encode(identity))
        (here / "notice_s").write_text("600")
        code = send_folder(direct, folder / "code", "job.py")
        job = queue.submit(direct, spec, queue.JobRequest(script="job.py", args=(str(folder),), code=code)).job
        with log.open("wb") as said:
            command = [sys.executable, "-m", "gpuctl.bootstrap.agent", str(here)]
            agent = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        try:
            until(lambda: (folder / "begun").exists(), "the job to begin")
            yield _Node(agent, proxy, direct, job, log)
        finally:
            agent.kill()
            agent.wait()


@contextmanager
def _agent(folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as said:
        command = [sys.executable, "-c", dedent(_AGENT), str(folder)]
        agent = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()
