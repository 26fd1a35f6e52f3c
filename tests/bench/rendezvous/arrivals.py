"""Pods that arrive: in every order, sixty-four of them, and several runs side by side."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from gpuctl.bootstrap.rendezvous.mingle import meet
from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.bench.network import Network
from tests.bench.rendezvous.pods import pods
from tests.bench.steplog import spread
from tests.bench.table import Row
from tests.waiting import PATIENCE_S

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


def many(url: str, runs: int) -> Row:
    """Nodes as threads of one process: seconds from the last one's arrival to all of them knowing the round, and
    requests of the bucket a node."""
    largest = [_meeting(url, f"many-{_MANY[-1]}-{run}", _MANY[-1]) for run in range(runs)]
    smaller = {size: _meeting(url, f"many-{size}", size) for size in _MANY[:-1]}
    per_node = {size: requests / size for size, (_, requests) in {**smaller, _MANY[-1]: largest[0]}.items()}
    growth = per_node[_MANY[-1]] / per_node[_MANY[0]]
    seconds = [s for s, _ in largest]
    rates = ", ".join(f"{size}: {rate:.1f}" for size, rate in per_node.items())
    note = f"{spread(seconds)} in {runs} runs; requests a node at N = {rates} (x {growth:.2f})"
    met = max(seconds) <= MANY_BAR_S and growth <= GROWTH_BAR
    bar = f"<= {MANY_BAR_S:g} s, requests as N"
    return Row("mingle_wait_64", median(seconds), None, "s", bar, met, note)


def side_by_side(url: str, runs: int) -> Row:
    """Eight IDs in one bucket, four nodes each, as threads: the slowest run's seconds over those of one run alone."""
    alone = [_meeting(url, f"alone-{run}", 4)[0] for run in range(runs)]
    together: list[float] = []
    for run in range(runs):
        with ThreadPoolExecutor(_IDS) as pool:
            meetings = [pool.submit(_meeting, url, f"side-{run}-{one}", 4) for one in range(_IDS)]
            together.append(max(meeting.result()[0] for meeting in meetings))
    ratio = median(together) / median(alone)
    note = f"alone {spread(alone)}, the slowest of {_IDS} {spread(together)} in {runs} runs"
    bar = f"<= {_SIDE_BY_SIDE_BAR:g} x"
    row = (median(together), median(alone), "s", bar, ratio <= _SIDE_BY_SIDE_BAR, note)
    return Row(f"mingle_{_IDS}_ids", *row)


def _meeting(url: str, run: str, nodes: int) -> tuple[float, int]:
    """Seconds after the last one's arrival, and requests of all of them together."""
    counts: Counter[str] = Counter()
    last = 0.0
    known: list[float] = []

    def come(number: int) -> None:
        request = RunRequest(run, nodes, nodes, host=f"h{number}")
        bucket = _counted(open_bucket(url), counts)
        meet(bucket, request, Attendee(request.host, "127.0.0.1"), PATIENCE_S, lambda _: None)
        known.append(time.monotonic())

    threads = [threading.Thread(target=come, args=(number,)) for number in range(nodes)]
    for thread in threads[:-1]:
        thread.start()
    time.sleep(1.0)  # so that the last one comes last
    last = time.monotonic()
    threads[-1].start()
    for thread in threads:
        thread.join()
    return max(known) - last, counts.total()


def _counted(bucket: Bucket, counts: Counter[str]) -> Bucket:
    """The same bucket, and what it opens below itself, with requests counted."""
    ask, at = bucket.ask, bucket.at

    def counting(key: str, call: object) -> object:
        counts["requests"] += 1
        return ask(key, call)  # type: ignore[arg-type]

    bucket.ask = counting  # type: ignore[method-assign, assignment]
    bucket.at = lambda prefix: _counted(at(prefix), counts)  # type: ignore[method-assign]
    return bucket
