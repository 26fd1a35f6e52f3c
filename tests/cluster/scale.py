"""Many agents' agreement in one process: how long to a round, and how many requests of the store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuctl.cluster import layout
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.membership.failure_detector import PeerState
from gpuctl.cluster.membership.mingle import Mingle
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.interface import Entry
from tests.waiting import PATIENCE_S

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    nodes: int
    seconds: float
    """From all started to every one of them knowing the same round."""
    requests_per_s: float
    """Of all nodes together, while the round goes on undisturbed."""
    rounds: int
    """Different rounds that the nodes ended up with: 1, or they disagree."""


def measure(nodes: int, url: str, *, quiet_s: float = 2.0) -> Measured:
    """Run ``nodes`` agents as threads, each with a store of its own on the bucket ``url``, until they agree on a round
    of all of them, and then for ``quiet_s`` more. No direct contact: everything goes through the bucket."""
    bucket = open_bucket(url)
    spec = ClusterSpec(name="scale", provider="none", nodes_min=nodes, nodes_max=nodes, heartbeat_s=HEARTBEAT_S)
    bucket.put(layout.CLUSTER, encode(spec))
    job = queue.submit(bucket, spec, queue.JobRequest(script="s.py")).job
    counts: Counter[str] = Counter()
    stop = threading.Event()
    agents = [_Agent(f"n{i:03d}", url, spec, counts, stop) for i in range(nodes)]
    began = time.monotonic()
    for agent in agents:
        agent.start()
    try:
        while not all(agent.knows(job) for agent in agents):
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(f"{nodes} agents did not agree in {PATIENCE_S:g} s")
            time.sleep(0.01)
        seconds = time.monotonic() - began
        before, since = counts.total(), time.monotonic()
        time.sleep(quiet_s)  # the length of the measurement
        rate = (counts.total() - before) / (time.monotonic() - since)
    finally:
        stop.set()
        for agent in agents:
            agent.join()
    found = {(r.number, r.members, r.master_port) for agent in agents if (r := agent.knows(job))}
    return Measured(nodes, seconds, rate, len(found))


class _Agent(threading.Thread):
    """A node that beats and looks, as ``bootstrap.agent`` does, and runs nothing."""

    def __init__(self, name: str, url: str, spec: ClusterSpec, counts: Counter[str], stop: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._record = NodeRecord(
            node=name, incarnation="1", beat=0, address=name, port=1, spare_ports=(1, 2, 3), ready=True
        )
        self._store = _Counted(open_bucket(url), counts)
        self._mingle = Mingle(self._store, SystemClock(), _Alone(), spec, lambda: self._record)
        self._stop_asked = stop

    def knows(self, job: str) -> Round | None:
        version = self._mingle.jobs.get(job)
        return version.value if version and version.value and version.value.phase == "run" else None

    def run(self) -> None:
        beat = 0
        while not self._stop_asked.is_set():
            beat += 1
            self._beat(beat)
            if self._mingle.tick():
                beat += 1
                self._beat(beat)
            self._stop_asked.wait(HEARTBEAT_S)

    def _beat(self, beat: int) -> None:
        self._store.put(layout.node(self._record.node), encode(self._mingle.heartbeat(beat)))


class _Alone:
    """No direct contact with anybody."""

    def of(self, node: str, incarnation: str) -> PeerState:  # noqa: ARG002
        return "unknown"

    def attend(self, records: Iterable[NodeRecord]) -> None:
        pass


class _Counted:
    """A ``Store`` that counts requests."""

    def __init__(self, bucket: Bucket, counts: Counter[str]) -> None:
        self._bucket = bucket
        self._counts = counts

    def get(self, key: str) -> bytes | None:
        self._counts["get"] += 1
        return self._bucket.get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._counts["get"] += len(keys)
        return self._bucket.get_many(keys)

    def put(self, key: str, data: bytes) -> None:
        self._counts["put"] += 1
        self._bucket.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._counts["put"] += 1
        return self._bucket.create(key, data)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        self._counts["list"] += 1
        return self._bucket.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._counts["delete"] += len(keys)
        self._bucket.delete(keys)
