"""Nodes in threads that meet in a folder: who comes when, with which rank, and who leaves."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuctl.bootstrap.rendezvous import session
from gpuctl.bootstrap.rendezvous.mingle import checked_rank, mingle
from gpuctl.bootstrap.rendezvous.session import NotAllHere
from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.rounds import Round
from tests.bootstrap.rendezvous.meeting import Node, Place, met
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def place(file_url: str) -> Place:
    return Place(file_url)


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


def test_clocks_that_are_off_by_an_hour_do_not_matter(place: Place) -> None:
    nodes = [Node(place, f"h{number}", (3, 3), ahead_s=ahead) for number, ahead in enumerate((-3600.0, 0.0, 3600.0))]
    for node in nodes:
        node.in_round(1, 3)
    late = Node(place, "h3", (3, 3), ahead_s=7200.0)
    late.says("a spare beside 3")
    for node in nodes:
        node.tasks[-1].ends()
    for node in nodes:
        outcome = node.ended.result(PATIENCE_S)
        assert outcome is not None
        assert outcome.result == "succeeded"
    late.session.take_notice(20.0, "test")
    assert late.ended.result(PATIENCE_S) is None


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
    spare.says("a spare beside 2")
    b.session.take_notice(20.0, "test")
    assert b.ended.result(PATIENCE_S) is None
    for node in (a, spare):
        node.in_round(2, 2)
    for node in (a, spare):
        node.tasks[-1].ends()
    assert {node.ended.result(PATIENCE_S).result for node in (a, spare)} == {"succeeded"}  # type: ignore[union-attr]


def test_a_waiting_node_that_is_asked_to_leave_is_gone_at_once_and_the_others_are_told(place: Place) -> None:
    a, b = Node(place, "h1", (3, 3)), Node(place, "h2", (3, 3))
    b.says("2 of 3 are here")
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


def test_a_spare_of_a_run_that_has_ended_is_in_the_next(place: Place) -> None:
    a = Node(place, "h1", (1, 1))
    a.in_round(1, 1)
    spare = Node(place, "h2", (1, 1))
    spare.says("a spare beside 1")
    a.tasks[-1].ends()
    assert a.ended.result(PATIENCE_S) is not None
    spare.in_round(1, 1)
    assert any("exp1 ended as this node came; this is the next run" in line for line in spare.said)
    spare.tasks[-1].ends()
    assert spare.ended.result(PATIENCE_S) is not None


def test_a_spare_of_commands_ends_with_them(place: Place) -> None:
    a = Node(place, "h1", (1, 1))
    a.in_round(1, 1)
    spare = Node(place, "h2", (1, 1), ends_as_spare=True)
    spare.says("a spare beside 1")
    a.tasks[-1].ends()
    outcome = spare.ended.result(PATIENCE_S)
    assert outcome is not None
    assert outcome.result == "succeeded"
    assert spare.tasks == []


def test_a_spare_that_waits_no_longer_says_what_for(place: Place) -> None:
    a = Node(place, "h1", (1, 1))
    a.in_round(1, 1)
    with pytest.raises(NotAllHere, match=r"waited 1 s for exp1: it runs on 1 others, and this one is a spare"):
        Node(place, "h2", (1, 1), timeout_s=1).ended.result(PATIENCE_S)
    a.tasks[-1].ends()
    assert a.ended.result(PATIENCE_S) is not None


def test_rank_0_can_listen_at_the_port_that_all_are_told(place: Place) -> None:
    heard: list[socket.socket] = []

    def listen(round_: Round, rank: int) -> None:
        if rank == 0:
            heard.append(socket.create_server((round_.master_address, round_.master_port)))

    nodes = [Node(place, host, (2, 2), at_start=listen) for host in ("h1", "h2")]
    for node in nodes:
        node.in_round(1, 2).ends()
    for node in nodes:
        assert node.ended.result(PATIENCE_S) is not None
    assert len(heard) == 1
    heard[0].close()


def test_a_rank_that_somebody_holds_in_a_round_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A while later: what holds it may be an earlier life of the node that comes."""
    monkeypatch.setattr(session, "_CLASH_S", 0.5)
    a = Node(place, "h1", (1, 1), rank=0)
    a.in_round(1, 1)
    late = Node(place, "h2", (1, 1), rank=0)
    with pytest.raises(BadInput, match=r"rank 0 of exp1 is taken by h1-\w+ \(127.0.0.11\); choose another --rank"):
        late.ended.result(PATIENCE_S)
    a.tasks[-1].ends()
    assert a.ended.result(PATIENCE_S) is not None


def test_the_time_to_wait_is_not_that_to_work(place: Place) -> None:
    a = Node(place, "h1", (1, 1), timeout_s=0.5)
    a.in_round(1, 1)
    with pytest.raises(TimeoutError):
        a.ended.result(2.0)  # longer than it may wait
    a.tasks[-1].ends()
    assert a.ended.result(PATIENCE_S) is not None


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": "2"},
        {"nodes": 2.0},
        {"nodes": True},
        {"nodes": 0},
        {"nodes": -1},
        {"port": 99999},
        {"port": -1},
        {"port": "80"},
        {"timeout": -1},
        {"timeout": "5"},
        {"rank": "0"},
        {"id": 5},
    ],
    ids=str,
)
def test_what_a_program_hands_over_by_mistake_is_refused_and_nothing_is_written(
    place: Place, wrong: dict[str, object]
) -> None:
    with pytest.raises(BadInput, match=repr(*wrong.values())):
        mingle(**{"id": "exp1", "nodes": 2, "bucket": place.bucket.url, **wrong})  # type: ignore[arg-type]
    assert place.bucket.list(layout.MINGLE) == []


def test_the_public_call_refuses_what_cannot_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUCTL_BUCKET", raising=False)
    with pytest.raises(BadInput, match="no bucket is given; pass bucket=URL, or set GPUCTL_BUCKET"):
        mingle("exp1", 2)
    for rank in (-1, 2):
        with pytest.raises(BadInput, match=f"--rank {rank} is not below the number of nodes, 2"):
            mingle("exp1", 2, bucket=place.bucket.url, rank=rank)
    with pytest.raises(BadInput, match="needs a fixed number of nodes, not 2:4"):
        checked_rank(0, 2, 4)
