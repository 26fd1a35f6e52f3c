"""Nodes in threads that meet in a folder: who comes when, with which rank, and who leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gpuctl.bootstrap.rendezvous.mingle import checked_rank, meet, mingle
from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.placement import Placement
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.rendezvous.session import NotAllHere, Session
from gpuctl.cluster import layout
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.rounds import JobOutcome, NodeExit, Round
from gpuctl.cluster.storage.bucket import open_bucket
from tests.waiting import PATIENCE_S, until


class Place:
    """Where nodes meet. Each has an address of its own, and what it says is kept."""

    def __init__(self, url: str) -> None:
        self.bucket = open_bucket(url)
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


@pytest.fixture
def place(file_url: str) -> Place:
    return Place(file_url)


def met(*nodes: Future[Placement]) -> list[Placement]:
    """All of them, by rank; they have been told the same."""
    found = sorted((node.result(PATIENCE_S) for node in nodes), key=lambda one: one.rank)
    assert [one.rank for one in found] == list(range(len(nodes)))
    assert len({(one.master_address, one.master_port, one.nodes, one.round, one.world_size) for one in found}) == 1
    assert found[0].world_size == len(nodes)
    assert found[0].master_address == found[0].local_address
    return found


def test_whoever_comes_first_waits_and_all_learn_the_same(place: Place) -> None:
    first = place.comes("h1", 3)
    place.wait_for("h1", "1 of 3 are here: h1-")
    second = place.comes("h2", 3)
    place.wait_for("h1", "2 of 3 are here: h1-")
    assert not first.done()
    found = met(first, second, place.comes("h3", 3))
    assert found[0].nodes[0].startswith("h1-")
    assert place.nodes() == [], "nothing is left of them"


def test_chosen_ranks_are_given_and_the_others_fill_the_gaps(place: Place) -> None:
    rank0_comes_last = [place.comes("h3", 4, rank=3), place.comes("h1", 4), place.comes("h2", 4)]
    place.wait_for("h1", "3 of 4 are here")
    found = met(*rank0_comes_last, place.comes("h0", 4, rank=0))
    assert [name[:2] for name in found[0].nodes][::3] == ["h0", "h3"]
    assert found[1].master_address == "127.0.0.10"


def test_a_rank_that_two_have_chosen_is_told_to_all_with_both_hosts(place: Place) -> None:
    nodes = [place.comes("h1", 3, rank=1), place.comes("h2", 3, rank=1), place.comes("h3", 3)]
    for node in nodes:
        with pytest.raises(GpuctlError, match=r"rank 1 was chosen on h\d \(127.0.0.1\d\) and on h\d ") as error:
            node.result(PATIENCE_S)
        assert error.value.exit_code == 2
    assert place.nodes() == []


def test_when_the_time_is_over_it_is_told_who_came_and_who_did_not(place: Place) -> None:
    with pytest.raises(NotAllHere, match=r"waited 1 s for exp1: 1 of 3 came: h1 \(127.0.0.11\); missing: 2") as error:
        place.comes("h1", 3, timeout_s=1).result(PATIENCE_S)
    assert error.value.exit_code == 124
    with pytest.raises(NotAllHere, match=r"1 of 3 came: h1 \(127.0.0.11\); missing: ranks 0, 2"):
        place.comes("h1", 3, rank=1, timeout_s=1).result(PATIENCE_S)
    assert place.nodes() == []


def test_an_id_can_be_used_again(place: Place) -> None:
    for _ in range(2):
        met(place.comes("h1", 2), place.comes("h2", 2))
    met(place.comes("h1", 3), place.comes("h2", 3), place.comes("h3", 3))


def test_runs_under_different_ids_do_not_meet(place: Place) -> None:
    alone = place.comes("h9", 2, run="other")
    met(place.comes("h1", 2), place.comes("h2", 2))
    assert not alone.done()
    met(alone, place.comes("h8", 2, run="other"))


def test_a_run_in_use_is_refused_to_who_comes_with_another_number(place: Place) -> None:
    waiting = place.comes("h1", 2)
    place.wait_for("h1", "1 of 2 are here")
    with pytest.raises(BadInput, match=r"exp1 is in use with --nodes 2: h1 \(127.0.0.11\) is in it"):
        place.comes("h2", 3).result(PATIENCE_S)
    met(waiting, place.comes("h3", 2))


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


class Node:
    """A node whose rounds the test ends."""

    def __init__(self, place: Place, host: str, size: tuple[int, int]) -> None:
        self.tasks: list[Task] = []
        self.said: list[str] = []
        request = RunRequest("exp1", *size, host=host)
        attendee = Attendee(host, f"127.0.0.{10 + int(host[1:])}")
        self.session = Session(place.bucket, request, attendee, self._begin, SystemClock(), self.said.append)
        self.ended: Future[JobOutcome | None] = Future()
        threading.Thread(target=self._stay, daemon=True).start()

    def _begin(self, round_: Round, rank: int, on_end: Callable[[], None]) -> Task:
        self.tasks.append(Task(round_, rank, on_end))
        return self.tasks[-1]

    def _stay(self) -> None:
        try:
            self.ended.set_result(self.session.stay())
        except BaseException as error:  # noqa: BLE001 - for whoever asks
            self.ended.set_exception(error)

    def in_round(self, number: int, size: int) -> Task:
        """Its part in that round, or a later one, of so many nodes."""

        def found() -> Task | None:
            task = self.tasks[-1] if self.tasks else None
            fits = task is not None and task.round.number >= number and len(task.round.members) == size
            return task if fits else None

        return until(found, f"round {number} of {size} nodes")


def test_a_node_that_comes_later_joins_and_one_that_leaves_ends_no_run(place: Place) -> None:
    a, b = Node(place, "h1", (2, 3)), Node(place, "h2", (2, 3))
    first = a.in_round(1, 2)
    c = Node(place, "h3", (2, 3))
    joined = [node.in_round(first.round.number + 1, 3) for node in (a, b, c)]
    leaving = next(node for node in (a, b, c) if node.tasks[-1].rank == 0)
    leaving.session.take_notice(20.0, "test")
    assert leaving.ended.result(PATIENCE_S) is None
    left = [node for node in (a, b, c) if node is not leaving]
    for node in left:
        task = node.in_round(joined[0].round.number + 1, 2)
        assert "given notice" in task.round.reason
    for node in left:
        node.tasks[-1].ends()
    for node in left:
        outcome = node.ended.result(PATIENCE_S)
        assert outcome is not None
        assert outcome.result == "succeeded"
    assert place.nodes() == []


def test_one_too_many_waits_as_a_spare_and_takes_the_place_of_one_that_leaves(place: Place) -> None:
    a, b = Node(place, "h1", (2, 2)), Node(place, "h2", (2, 2))
    a.in_round(1, 2)
    spare = Node(place, "h3", (2, 2))
    until(lambda: any("a spare beside 2" in line for line in spare.said), "it to be told")
    b.session.take_notice(20.0, "test")
    assert b.ended.result(PATIENCE_S) is None
    for node in (a, spare):
        node.in_round(2, 2)
    for node in (a, spare):
        node.tasks[-1].ends()
    assert {node.ended.result(PATIENCE_S).result for node in (a, spare)} == {"succeeded"}  # type: ignore[union-attr]


def test_a_waiting_node_that_is_asked_to_leave_is_gone_at_once_and_the_others_are_told(place: Place) -> None:
    a, b = Node(place, "h1", (3, 3)), Node(place, "h2", (3, 3))
    until(lambda: any("2 of 3 are here" in line for line in b.said), "both to have met")
    a.session.take_notice(20.0, "test")
    assert a.ended.result(PATIENCE_S) is None
    until(lambda: any(line.startswith("1 of 3 are here: h2-") for line in b.said), "the other to be told")
    assert not a.tasks
    assert len(place.nodes()) == 1
    b.session.take_notice(20.0, "test")
    assert b.ended.result(PATIENCE_S) is None
    c = Node(place, "h3", (1, 1))  # nobody is left in the run, so another may have another size
    assert c.in_round(1, 1)
    c.tasks[-1].ends()
    assert c.ended.result(PATIENCE_S) is not None


def test_the_public_call_meets_others_and_takes_the_bucket_from_the_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCTL_BUCKET", place.bucket.url)
    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(mingle, "exp1", 2, rank=rank, timeout=PATIENCE_S, say=said.append) for rank in (1, 0)]
        met_ = [node.result(PATIENCE_S) for node in nodes]
    assert [one.rank for one in met_] == [1, 0]
    assert met_[0].master_port == met_[1].master_port > 0
    assert any("1 of 2 are here" in line or "2 of 2 are here" in line for line in said)


def test_the_public_call_refuses_what_cannot_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUCTL_BUCKET", raising=False)
    with pytest.raises(BadInput, match="no bucket is given; pass bucket=URL, or set GPUCTL_BUCKET"):
        mingle("exp1", 2)
    for rank in (-1, 2):
        with pytest.raises(BadInput, match=f"--rank {rank} is not below the number of nodes, 2"):
            mingle("exp1", 2, bucket=place.bucket.url, rank=rank)
    with pytest.raises(BadInput, match="needs a fixed number of nodes, not 2:4"):
        checked_rank(0, 2, 4)
