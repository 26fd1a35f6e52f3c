"""A node that goes silent: its network is cut, nothing is reset, and it reaches neither the bucket nor its peers.

With root on Linux each node has a network namespace of its own and the bucket is a real S3 server. Otherwise all
processes of a local node are stopped, which is milder: the kernel still answers for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import msgspec
import psutil

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import processes
from tests.bench.losses import EVERY
from tests.bench.network import Network, is_possible, network, s3_bucket
from tests.bench.ours import Cluster, LocalCluster, local_cluster
from tests.bench.settings import Settings
from tests.bench.steplog import StepLog, spread
from tests.bench.table import Row
from tests.bench.torchrun import SCRIPT, attempted, torchrun
from tests.waiting import TookTooLong, until

BAR_S = 6.0
_WAIT_S = 30.0


def resume_silent(settings: Settings) -> Row:
    """The worse of rank 0's node and another one."""
    if is_possible():
        name, found = "resume_silent", _in_a_namespace(settings)
    else:
        name, found = "resume_silent (processes stopped, no root to cut a network)", _stopped(settings)
    seconds = {which: found[which] for which in ("rank0", "another")}
    worst = max(seconds, key=lambda which: median(seconds[which]))
    met = max(map(max, seconds.values())) <= BAR_S
    note = "; ".join(f"{which} {median(s):.2f} s ({spread(s)}) in {len(s)} runs" for which, s in seconds.items())
    note += "".join(f"; {line}" for line in found["notes"])
    return Row(name, median(seconds[worst]), found["torchrun"], "s", f"<= {BAR_S:g} s", met, note)


# -- cables ------------------------------------------------------------------------------------------------------------


def _in_a_namespace(settings: Settings) -> dict:  # type: ignore[type-arg]
    """Run this file as the switch."""
    answer = settings.root / "silence.json"
    command = ["unshare", "--net", sys.executable, __file__, str(settings.root), str(settings.runs), str(answer)]
    env = {**os.environ, processes.MARK: str(settings.root / "silence")}
    subprocess.run([*command, *(["fast"] if settings.fast else [])], check=True, env=env)
    found: dict = json.loads(answer.read_text())  # type: ignore[type-arg]
    return found


def main(root: str, runs: str, answer: str, fast: str = "") -> None:
    found: dict[str, object] = {"notes": [], "torchrun": None}
    with network() as net:
        for _ in range(3):
            net.add()
        with s3_bucket() as url, _agents(net, url, Path(root) / "silence") as cluster:
            found |= _cuts(net, cluster, int(runs), Path(root))
        if not fast:
            found["torchrun"] = attempted(lambda: _torchrun(net, Path(root)))
    Path(answer).write_text(json.dumps(found))


def _cuts(net: Network, cluster: Cluster, runs: int, root: Path) -> dict[str, list[float]]:
    log = StepLog(root / "silence-steps")
    job = cluster.submit(SCRIPT, ["--marks", str(log.path), "--every", str(EVERY)], root)
    seconds: dict[str, list[float]] = {"rank0": [], "another": []}
    for which in list(seconds) * runs:
        cluster.wait_for_world(job, 3)
        log.wait_for_steady(3)
        rank0 = int(cluster.rank0().removeprefix("node-"))
        node = rank0 if which == "rank0" else (rank0 + 1) % 3
        seconds[which].append(_silent(log, lambda node=node: net.cut(node)))  # type: ignore[misc]
        net.mend(node)
    return seconds


@contextlib.contextmanager
def _agents(net: Network, url: str, root: Path) -> Iterator[Cluster]:
    """Three nodes as a cloud's would be: defaults for heartbeat and lease."""
    bucket = open_bucket(url)
    spec = ClusterSpec(name="bench", provider="bench", nodes_min=2, nodes_max=3, token=secrets.token_hex(16))
    bucket.create(layout.CLUSTER, encode(spec))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(3):
            started.append(_agent(net, number, url, root / f"node-{number}"))  # noqa: PERF401 - ended if one fails
        cluster = Cluster(bucket, root)
        until(lambda: len(cluster.records()) == 3, "three live nodes")
        yield cluster
    finally:
        for number in range(3):
            processes.kill_all(root / f"node-{number}")
        for process in started:
            process.wait()


def _agent(net: Network, number: int, url: str, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    identity = NodeIdentity(node=folder.name, address=net.address(number), bucket=url, env=env)
    (folder / "identity.json").write_bytes(msgspec.json.encode(identity))
    with (folder / "agent.log").open("wb") as output:
        return subprocess.Popen(
            [*net.inside(number), sys.executable, "-m", "gpuctl.bootstrap.agent", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, processes.MARK: str(folder)},
            start_new_session=True,
        )


def _torchrun(net: Network, root: Path) -> str:
    """Cut off the node that hosts its store."""
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    with torchrun(root, [0, 1, 2], inside=net.inside, address=net.address, env=env) as job:
        try:
            return f"{_silent(job.log, lambda: net.cut(0), _WAIT_S):.1f} s"
        except TookTooLong:
            codes = job.exit_codes()
            return f"never: exited with {codes}" if codes else f"> {_WAIT_S:g} s (not waited longer)"


def _silent(log: StepLog, cut: Callable[[], None], patience_s: float = 60.0) -> float:
    """Seconds from the cut to the next optimizer step of the others' next round."""
    old = log.pids()
    at = time.monotonic()
    cut()
    first = until(lambda: log.first_step_of_new(old), "a step after the silence", patience_s)
    return first.at - at


# -- without root ------------------------------------------------------------------------------------------------------


def _stopped(settings: Settings) -> dict:  # type: ignore[type-arg]
    seconds: dict[str, list[float]] = {"rank0": [], "another": []}
    with local_cluster(settings.root, (2, 3)) as cluster:
        log = StepLog(cluster.nodes_dir.parent / "steps")
        job = cluster.submit(SCRIPT, ["--marks", str(log.path), "--every", str(EVERY)], settings.root)
        for which in list(seconds) * settings.runs:
            log.wait_for_steady(3)
            node = cluster.rank0()
            if which != "rank0":
                node = next(name for name in cluster.records() if name != node)
            seconds[which].append(_silent(log, lambda node=node: _signal(cluster, node, signal.SIGSTOP)))  # type: ignore[misc]
            _signal(cluster, node, signal.SIGCONT)
        cluster.end(job)
    return {**seconds, "torchrun": None, "notes": []}


def _signal(cluster: LocalCluster, node: str, number: signal.Signals) -> None:
    for process in processes.marked_processes(cluster.nodes_dir / node):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
