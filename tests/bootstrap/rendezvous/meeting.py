"""Nodes in threads of one process, which meet in a bucket; what they do in a round, and how it ends, is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gpuctl.bootstrap.rendezvous.mingle import meet
from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.placement import Placement
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.rendezvous.session import Session
from gpuctl.cluster import layout
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.records.rounds import JobOutcome, NodeExit, Round
from gpuctl.cluster.storage.bucket import open_bucket
from tests.waiting import PATIENCE_S, until


class Place:
    """Where nodes meet. Each has an address of its own, and what it says is kept."""

    def __init__(self, url: str) -> None:
        self.bucket = open_bucket(url, patience_s=0.5, timeout_s=2.0)
        self._pool = ThreadPoolExecutor(16)
        self.said: dict[str, list[str]] = {}

    def comes(
        self, host: str, size: int, *, run: str = "exp1", rank: int | None = None, timeout_s: float = PATIENCE_S
    ) -> Future[Placement]:
        said = self.said.setdefault(host, [])
        request = RunRequest(run, size, size, host=host)
        attendee = Attendee(host, f"127.0.0.{10 + int(host[1:])}", rank)
        return self._pool.submit(meet, self.bucket, request, attendee, timeout_s, said.append)

    def wait_for(self, host: str, words: str) -> str:
        """The first line that this host says with these words in it."""
        return until(lambda: next((line for line in self.said.get(host, []) if words in line), None), words)

    def nodes(self, run: str = "exp1") -> list[str]:
        return [entry.key for entry in self.bucket.list(f"{layout.MINGLE}/{run}") if "/nodes/" in entry.key]


def met(*nodes: Future[Placement]) -> list[Placement]:
    """All of them, by rank; they have been told the same."""
    found = sorted((node.result(PATIENCE_S) for node in nodes), key=lambda one: one.rank)
    assert [one.rank for one in found] == list(range(len(nodes)))
    assert len({(one.master_address, one.master_port, one.nodes, one.round, one.world_size) for one in found}) == 1
    assert found[0].world_size == len(nodes)
    assert found[0].master_address == found[0].local_address
    return found


class Task:
    """What a node does in a round, until it is told how that ends. See ``reconcile.Work``."""

    def __init__(self, round_: Round, rank: int, on_end: Callable[[], None]) -> None:
        self.round, self.rank, self._on_end = round_, rank, on_end
        self.exit: NodeExit | None = None

    def ends(self, status: str = "completed") -> None:
        if self.exit is None:
            member = self.round.members[self.rank]
            self.exit = NodeExit(
                job=self.round.job,
                round=self.round.number,
                node=member.node,
                incarnation=member.incarnation,
                status=status,  # type: ignore[arg-type]
            )
            self._on_end()

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def ask_to_stop(self, round_: Round) -> None:  # noqa: ARG002
        self.ends("drained")

    def kill(self) -> None:
        self.ends("stopped")

    def send_last_words(self) -> None: ...

    def end(self) -> None: ...


class _Ahead(SystemClock):
    """A machine's clock that somebody has set wrong."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        return super().time() + self._ahead_s


class Node:
    """A node whose rounds the test ends. ``at_start`` is done as each begins; ``ahead_s``: of its clock."""

    def __init__(
        self,
        place: Place,
        host: str,
        size: tuple[int, int],
        *,
        rank: int | None = None,
        timeout_s: float | None = None,
        ahead_s: float = 0.0,
        ends_as_spare: bool = False,
        at_start: Callable[[Round, int], None] = lambda *_: None,
    ) -> None:
        self.tasks: list[Task] = []
        self.said: list[str] = []
        self._at_start = at_start
        request = RunRequest("exp1", *size, host=host)
        attendee = Attendee(host, f"127.0.0.{10 + int(host[1:])}", rank)
        clock = _Ahead(ahead_s)
        self.session = Session(
            place.bucket,
            request,
            attendee,
            self._begin,
            clock,
            self.said.append,
            timeout_s,
            ends_as_spare=ends_as_spare,
        )
        self.ended: Future[JobOutcome | None] = Future()
        threading.Thread(target=self._stay, daemon=True).start()

    def _begin(self, round_: Round, rank: int, on_end: Callable[[], None]) -> Task:
        self._at_start(round_, rank)
        self.tasks.append(Task(round_, rank, on_end))
        return self.tasks[-1]

    def _stay(self) -> None:
        try:
            self.ended.set_result(self.session.stay())
        except BaseException as error:  # noqa: BLE001 - for whoever asks
            self.ended.set_exception(error)

    def says(self, words: str) -> None:
        until(lambda: any(words in line for line in self.said), words)

    def in_round(self, number: int, size: int) -> Task:
        """Its part in that round, or a later one, of so many nodes."""

        def found() -> Task | None:
            assert not self.ended.done(), self.ended.exception() or "it has left"
            task = self.tasks[-1] if self.tasks else None
            fits = task is not None and task.round.number >= number and len(task.round.members) == size
            return task if fits else None

        return until(found, f"round {number} of {size} nodes")
