"""Pods that arrive: in every order, sixty-four of them, and several runs side by side."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median

from gpuctl.bootstrap.rendezvous.command import Meeting
from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.rendezvous.session import Session
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.bench.network import Network
from tests.bench.rendezvous.pods import Pods, pods
from tests.bench.steplog import spread
from tests.bench.table import Row
from tests.waiting import PATIENCE_S, until

ORDER_BAR_S = 2.0
MANY_BAR_S = 5.0
GROWTH_BAR = 1.5
_PAUSE_S = 0.4
_MANY = (8, 16, 32, 64)
_IDS = 8
_SIDE_BY_SIDE_BAR = 1.2


def orders(net: Network, url: str, root: Path, runs: int) -> Row:
    """Four pods with ranks of their own, in each of the 24 orders; seconds from the start of the last one's process to
    the first step of all. ``runs``: at most so many orders times five."""
    seconds: list[float] = []
    chosen = list(itertools.permutations(range(4)))[: 5 * runs]
    for number, order in enumerate(chosen):
        with pods(net, url, root, f"order-{number}", "4") as run:
            for rank in order:
                if rank != order[0]:
                    time.sleep(_PAUSE_S)  # what is measured is an order of arrival
                at = time.monotonic()
                run.start(net.add(), "--rank", str(rank))
            seconds.append(run.first_step_after(set()) - at)
    note = f"{spread(seconds)} in {len(seconds)} orders, all of which started"
    met = len(seconds) == len(chosen) and max(seconds) <= ORDER_BAR_S
    return Row("mingle_orders", median(seconds), None, "s", f"<= {ORDER_BAR_S:g} s, {len(chosen)} orders", met, note)


def orders_of(kind: type[Pods], name: str, net: Network, url: str, root: Path, runs: int) -> Row:
    """The same four machines in each of the 24 orders; seconds from the start of the last one's process, which imports
    torch, to the first step of all."""
    seconds: list[float] = []
    machines = [net.add() for _ in range(4)]
    chosen = list(itertools.permutations(machines))[: 5 * runs]
    for number, order in enumerate(chosen):
        with pods(net, url, root, f"{name.replace('_', '-')}-{number}", "4", kind) as run:
            for machine in order:
                if machine != order[0]:
                    time.sleep(_PAUSE_S)
                at = time.monotonic()
                run.start(machine)
            seconds.append(run.first_step_after(set()) - at)
    note = f"{spread(seconds)} in {len(seconds)} orders, all of which started"
    return Row(name, median(seconds), None, "s", f"{len(chosen)} orders start", len(seconds) == len(chosen), note)


def many(url: str, runs: int) -> Row:
    """Nodes as threads of one process: seconds from the last one's arrival, when all others wait, to all of them
    knowing the round, and requests of the bucket a node."""
    seconds: list[float] = []
    per_node: dict[int, float] = {}
    for number, size in enumerate([*_MANY, *[_MANY[-1]] * (runs - 1)]):
        meeting = _Meeting(url, f"many-{number}", size)
        took = meeting.complete()
        per_node.setdefault(size, meeting.requests / size)
        if size == _MANY[-1]:
            seconds.append(took)
    growth = per_node[_MANY[-1]] / per_node[_MANY[0]]
    rates = ", ".join(f"{size}: {rate:.1f}" for size, rate in per_node.items())
    note = f"{spread(seconds)} in {runs} runs; requests a node at N = {rates} (x {growth:.2f})"
    met = max(seconds) <= MANY_BAR_S and growth <= GROWTH_BAR
    bar = f"<= {MANY_BAR_S:g} s, requests as N"
    return Row("mingle_wait_64", median(seconds), None, "s", bar, met, note)


def side_by_side(url: str, runs: int) -> Row:
    """Four nodes of an ID of which the last one comes, as threads: its seconds while seven other IDs wait in the same
    bucket, and meet one after the other, over those of an ID that is alone in it."""
    alone = [_Meeting(url, f"alone-{run}", 4).complete() for run in range(runs)]
    beside: list[float] = []
    for run in range(runs):
        meetings = [_Meeting(url, f"side-{run}-{one}", 4) for one in range(_IDS)]
        beside += [meeting.complete() for meeting in meetings]
    ratio = median(beside) / median(alone)
    note = f"alone {spread(alone)} s, one of {_IDS} {spread(beside)} s, {runs} runs"
    bar = f"<= {_SIDE_BY_SIDE_BAR:g} x"
    return Row(f"mingle_{_IDS}_ids", median(beside), median(alone), "s", bar, ratio <= _SIDE_BY_SIDE_BAR, note)


class _Meeting:
    """All nodes of a run but the last, which wait for it and know of each other."""

    def __init__(self, url: str, run: str, nodes: int) -> None:
        self._url, self._run, self._nodes = url, run, nodes
        self._counts: Counter[str] = Counter()
        self._known: list[float] = []
        self._waiting: set[int] = set()
        self._threads = [threading.Thread(target=self._come, args=(number,)) for number in range(nodes)]
        for thread in self._threads[:-1]:
            thread.start()
        until(lambda: len(self._waiting) == nodes - 1, f"{nodes - 1} nodes to wait")

    @property
    def requests(self) -> int:
        """Of all of them together."""
        return self._counts.total()

    def complete(self) -> float:
        """The last one comes; returns how many seconds later all of them know the round."""
        at = time.monotonic()
        self._threads[-1].start()
        for thread in self._threads:
            thread.join()
        return max(self._known) - at

    def _come(self, number: int) -> None:
        request = RunRequest(self._run, self._nodes, self._nodes, host=f"h{number}")
        bucket = _counted(open_bucket(self._url), self._counts)

        def say(line: str) -> None:
            if line.startswith(f"{self._nodes - 1} of {self._nodes} are here"):
                self._waiting.add(number)

        def begin(round_: Round, rank: int, on_end: object) -> Meeting:  # noqa: ARG001
            self._known.append(time.monotonic())
            return Meeting(round_, rank, clock)

        clock = SystemClock()
        attendee = Attendee(request.host, "127.0.0.1")
        Session(bucket, request, attendee, begin, clock, say, PATIENCE_S).stay()


def _counted(bucket: Bucket, counts: Counter[str]) -> Bucket:
    """The same bucket, and what it opens below itself, with requests counted."""
    ask, at = bucket.ask, bucket.at

    def counting(key: str, call: object) -> object:
        counts["requests"] += 1
        return ask(key, call)  # type: ignore[arg-type]

    bucket.ask = counting  # type: ignore[method-assign, assignment]
    bucket.at = lambda prefix: _counted(at(prefix), counts)  # type: ignore[method-assign]
    return bucket
