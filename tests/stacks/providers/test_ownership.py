"""Who may use the record that is in a bucket, and what others are told."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.providers.ownership import live_nodes, meet, refuse_strangers

URL = "s3://team/gpuctl?region=us-west-2&secret_access_key=hush"
LONG_AGO = 1_700_000_000.0
MINE = ClusterSpec(name="a", provider="aws", nodes_min=1, nodes_max=2, id="1" * 10)
THEIRS = replace(MINE, id="2" * 10, owner="kim@lab", created_at=LONG_AGO)


@pytest.mark.parametrize(
    ("there", "live"),
    [
        (None, 0),
        (MINE, 2),
        (THEIRS, 0),
        (replace(THEIRS, id=""), 0),
    ],
)
def test_nobody_is_there_or_it_is_the_same_cluster_or_gone(there: ClusterSpec | None, live: int) -> None:
    refuse_strangers(there, MINE, live, URL)


@pytest.mark.parametrize(
    ("there", "live", "said"),
    [
        (THEIRS, 3, "cluster 'a' of kim@lab, since 2023-11-14 22:13 UTC, 3 nodes live"),
        (replace(THEIRS, id="", owner=""), 1, "cluster 'a', since 2023-11-14 22:13 UTC, 1 node live"),
        (replace(THEIRS, name="b"), 0, "cluster 'b' of kim@lab, since 2023-11-14 22:13 UTC, no node live"),
        (replace(MINE, name="b"), 0, "cluster 'b', no node live"),
    ],
)
def test_a_stranger_is_told_who_since_when_and_how_many(there: ClusterSpec, live: int, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        refuse_strangers(there, MINE, live, URL)
    where = "s3://team/gpuctl?region=us-west-2"
    assert refused.value.message == f"{where} holds {said}"
    assert f"gpuctl attach {where}" in refused.value.hint
    assert "hush" not in str(refused.value)


def test_another_name_is_offered_a_prefix_of_its_own() -> None:
    with pytest.raises(BadInput, match=r"such as s3://team/a\?region=us-west-2"):
        refuse_strangers(replace(THEIRS, name="b"), MINE, 0, URL)


def test_a_record_that_was_just_made_is_not_taken_for_one_left_behind() -> None:
    with pytest.raises(BadInput, match="no node live"):
        refuse_strangers(THEIRS, MINE, 0, URL, age_s=60.0)
    refuse_strangers(THEIRS, MINE, 0, URL, age_s=3600.0)


def test_heartbeats_in_the_bucket_decide_whether_a_namesake_lives(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    assert meet(bucket, MINE) is None
    bucket.put(layout.CLUSTER, encode(THEIRS))
    assert meet(bucket, MINE) == THEIRS
    beat(bucket)
    with pytest.raises(BadInput, match="1 node live"):
        meet(bucket, MINE)
    assert meet(bucket, THEIRS) == THEIRS
    assert bucket.list("probe") == []


def test_a_node_that_was_silent_for_long_does_not_live(file_url: str) -> None:
    bucket = open_bucket(file_url)
    beat(bucket)
    assert live_nodes(bucket) == 1
    assert live_nodes(bucket, time.time() + 3600) == 0


def beat(bucket: Bucket) -> None:
    bucket.put(layout.node("n"), encode(NodeRecord(node="n", incarnation="i", beat=1, address="10.0.0.1", port=1)))
