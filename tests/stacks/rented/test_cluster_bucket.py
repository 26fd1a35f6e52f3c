"""What becomes of a cluster's records when ``up`` comes to a bucket that has some."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.rented.cluster_bucket import agree

THERE = ClusterSpec(name="a", provider="azure", nodes_min=1, nodes_max=1, id="1" * 10, owner="jo@lab", token="shared")


@pytest.fixture
def bucket(file_url: str) -> Bucket:
    """Of a cluster one of whose machines has told of itself."""
    found = open_bucket(file_url)
    found.put(layout.CLUSTER, encode(THERE))
    beat = NodeRecord(node="a_0", incarnation="i", beat=1, address="10.0.0.4", port=1)
    found.put(layout.node("a_0"), encode(beat))
    return found


def test_where_there_are_machines_their_secret_and_what_they_told_of_themselves_stay(bucket: Bucket) -> None:
    agree(bucket, replace(THERE, nodes_max=3, token="new"), has_machines=True)
    record = decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)
    assert (record.token, record.nodes_max) == ("shared", 3)
    assert bucket.get(layout.node("a_0"))


def test_what_machines_told_that_are_gone_is_not_taken_for_the_word_of_their_successors(bucket: Bucket) -> None:
    """Azure gives a new scale set's machines the names of the old one's."""
    agree(bucket, replace(THERE, token="new"), has_machines=False)
    assert bucket.get(layout.node("a_0")) is None
    assert bucket.get(layout.CLUSTER)
