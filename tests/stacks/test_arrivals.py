"""From machines to nodes, as ``up`` and ``repair`` wait for them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Bucket, open_bucket
from gpuctl.cluster.records import NodeRecord, encode
from gpuctl.stacks.arrivals import Arrivals, Wanted, pauses_between_looks
from gpuctl.stacks.cloud import Cloud, GroupSize


class OneMachine(Cloud):
    """A cloud whose group has a machine that runs."""

    name = "gcp"

    def program(self, *_: object) -> Mapping[str, object]:
        raise NotImplementedError

    def extras(self, *_: object) -> Any:
        raise NotImplementedError

    def size(self, _: Mapping[str, object]) -> GroupSize:
        return GroupSize(desired=1, running=1, names=("gpuctl-demo-1",))


def _beat(bucket: Bucket, incarnation: str, beat: int) -> None:
    record = NodeRecord(node="gpuctl-demo-1", incarnation=incarnation, beat=beat, address="10.0.0.1", port=1)
    bucket.put(layout.node(record.node), encode(record))


def test_what_a_machine_of_the_same_name_wrote_last_is_no_sign_of_life(file_url: str) -> None:
    bucket, said = open_bucket(file_url), list[str]()
    _beat(bucket, "taken", 7)
    looks: list[list[str]] = []

    def pause(_: float) -> None:
        looks.append(list(said))
        if len(looks) == 2:
            _beat(bucket, "its successor", 7)

    arrivals = Arrivals(OneMachine(), {}, bucket, said.append, now=lambda: 0.0, pause=pause)
    assert arrivals.wait(Wanted(1, 1, 60.0)) == 1
    assert looks == [["1 of 1 machines run"]] * 2
    assert said[-1] == "gpuctl-demo-1 is live"


def test_a_node_that_was_there_before_is_seen_to_live_by_its_next_heartbeat(file_url: str) -> None:
    bucket = open_bucket(file_url)
    _beat(bucket, "i", 1)
    beats = iter(range(2, 10))
    arrivals = Arrivals(
        OneMachine(), {}, bucket, lambda _: None, now=lambda: 0.0, pause=lambda _: _beat(bucket, "i", next(beats))
    )
    assert arrivals.wait(Wanted(1, 1, 60.0)) == 1
    assert next(beats) == 3


def test_looks_are_close_at_first_and_then_every_few_seconds() -> None:
    assert list(islice(pauses_between_looks(3.0), 6)) == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
