"""The agent as its machine starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest

from gpuctl.bootstrap.boot.idle import Idle
from gpuctl.bootstrap.identity import Identity
from gpuctl.cli.train import send_folder
from gpuctl.cluster import jobs, layout
from gpuctl.cluster.bucket import open_bucket
from gpuctl.cluster.records import ClusterSpec, encode
from tests.bootstrap.bare import wait_for
from tests.stores import s3

_AGENT = """
    import signal, sys
    from pathlib import Path
    import msgspec
    from gpuctl.bootstrap.agent import Agent
    from gpuctl.bootstrap.identity import Identity
    from gpuctl.bootstrap.traces import MOST_WAIT_S
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
    Agent(folder, msgspec.json.decode((folder / "identity.json").read_bytes(), type=Identity), clock).serve()
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


def test_an_agent_without_a_cluster_names_the_bucket_and_not_its_keys(tmp_path: Path, s3_url: str) -> None:
    """What it says goes to the journal, and from there into the bucket."""
    assert "secret_access_key=" in s3_url, "the test is about the keys"
    identity = Identity(node="node-0", address="127.0.0.1", bucket=s3_url)
    (tmp_path / "identity.json").write_bytes(msgspec.json.encode(identity))
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl.bootstrap.agent", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert said.endswith(f": there is no cluster at {s3_url.partition('?')[0]}; create it with `gpuctl up`\n")
    assert "access_key" not in said


@pytest.mark.parametrize("script", [_WORKS, _HANGS], ids=["over", "stalled"])
def test_a_machine_whose_bucket_is_gone_for_good_is_idle_some_time_after_its_job_is_over(
    script: str, tmp_path: Path
) -> None:
    """Else it is paid for for ever: nobody can tell that the job has ended, but the workers have."""
    root, here = tmp_path / "root", tmp_path / "node"
    (root / "proc").mkdir(parents=True)
    (root / "var/lib/gpuctl/boot").mkdir(parents=True)
    (root / "var/lib/gpuctl/boot/agent.done").touch()
    here.mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code/job.py").write_text(dedent(script))
    with ExitStack() as bucket:
        endpoint = bucket.enter_context(s3.serving())
        s3.create(endpoint, "gone")
        store = open_bucket(s3.url(endpoint, "gone"))
        spec = ClusterSpec(
            name="c", provider="ssh", nodes_min=1, nodes_max=1, slots=1, token="t", heartbeat_s=0.2, stall_minutes=0.05
        )
        store.put(layout.CLUSTER, encode(spec))
        identity = Identity(node="n", address="127.0.0.1", bucket=store.url, provider="ssh", root=str(root))
        (here / "identity.json").write_bytes(msgspec.json.encode(identity))
        code = send_folder(store, tmp_path / "code", "job.py")
        jobs.submit(store, spec, jobs.Request(script="job.py", args=(str(tmp_path),), code=code))
        with _agent(here, tmp_path / "agent.log") as agent:
            wait_for(lambda: (tmp_path / "begun").exists(), "the job to begin")
            bucket.close()
            (tmp_path / "go").touch()
            log = tmp_path / "agent.log"
            if script is _WORKS:
                wait_for(lambda: (tmp_path / "over").exists(), "the job to end")
            else:
                wait_for(lambda: "stalled: no step" in log.read_text(), "the job to count as stalled")
            watch = Idle(root, 4.0, lambda: 0.0)

            def is_over() -> bool:
                watch.look(time.monotonic())
                agent.send_signal(signal.SIGUSR1)  # half an hour passes
                return watch.is_over()

            wait_for(is_over, "the machine to be idle")


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
