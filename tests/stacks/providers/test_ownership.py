"""Who may use the record that is in a bucket, and what others are told."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.clusters import ClusterSpec, PastCluster
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.views.holders import live_nodes, read_past
from gpuctl.stacks.providers.ownership import agree_on_spec, forget_nodes, meet, refuse_strangers
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster

LONG_AGO = 1_700_000_000.0
MINE = ClusterSpec(name="a", provider="aws", nodes_min=1, nodes_max=2, id="1" * 10, owner="jo@lab")
THEIRS = replace(MINE, id="2" * 10, owner="kim@lab", created_at=LONG_AGO)
EARLIER = replace(THEIRS, owner=MINE.owner)
PAST = PastCluster(name="a", provider="aws", id=THEIRS.id, owner=THEIRS.owner, ended_at=LONG_AGO)


@pytest.fixture
def team() -> Bucket:
    """Nothing is asked of it."""
    return open_bucket("s3://team/gpuctl?region=us-west-2&access_key_id=x&secret_access_key=hush")


@pytest.mark.parametrize("there", [EARLIER, replace(THEIRS, id="", owner="")])
def test_what_a_crash_has_left_of_ones_own_is_no_strangers(there: ClusterSpec, team: Bucket) -> None:
    refuse_strangers(there, MINE, 0, team, age_s=3600.0)


@pytest.mark.parametrize(
    ("there", "live", "said"),
    [
        (THEIRS, 0, "cluster 'a' of kim@lab, since 2023-11-14 22:13 UTC, no node live"),
        (THEIRS, 3, "cluster 'a' of kim@lab, since 2023-11-14 22:13 UTC, 3 nodes live"),
        (EARLIER, 1, "cluster 'a' of jo@lab, since 2023-11-14 22:13 UTC, 1 node live"),
        (replace(THEIRS, id="", owner=""), 1, "cluster 'a', since 2023-11-14 22:13 UTC, 1 node live"),
        (replace(THEIRS, name="b"), 0, "cluster 'b' of kim@lab, since 2023-11-14 22:13 UTC, no node live"),
        (replace(MINE, name="b"), 0, "cluster 'b' of jo@lab, no node live"),
    ],
)
def test_a_stranger_is_told_who_since_when_and_how_many(there: ClusterSpec, live: int, said: str, team: Bucket) -> None:
    with pytest.raises(BadInput) as refused:
        refuse_strangers(there, MINE, live, team, age_s=3600.0)
    where = "s3://team/gpuctl?region=us-west-2"
    assert refused.value.message == f"{where} holds {said}"
    assert f"gpuctl attach {where}" in refused.value.hint
    assert ("gpuctl down --cluster" in refused.value.hint) == (not live)
    assert "hush" not in str(refused.value)


def test_another_name_is_offered_a_prefix_of_its_own(team: Bucket) -> None:
    with pytest.raises(BadInput, match=r"such as s3://team/a\?region=us-west-2"):
        refuse_strangers(replace(THEIRS, name="b"), MINE, 0, team, age_s=3600.0)


def test_a_record_that_was_just_made_is_not_taken_for_one_left_behind(team: Bucket) -> None:
    with pytest.raises(BadInput, match="no node live"):
        refuse_strangers(EARLIER, MINE, 0, team, age_s=60.0)
    refuse_strangers(EARLIER, MINE, 0, team, age_s=3600.0)


def test_a_silent_cluster_of_ones_own_is_taken_over_aloud_and_anothers_is_not(bucket_url: str) -> None:
    bucket, said = open_bucket(bucket_url), list[str]()
    assert meet(bucket, MINE, said.append) is None and not said
    bucket.put(layout.CLUSTER, encode(THEIRS))
    with pytest.raises(BadInput, match=r"of kim@lab, since .*, no node live"):
        meet(bucket, MINE)
    assert bucket.get(layout.CLUSTER) == encode(THEIRS)
    assert meet(bucket, THEIRS) == THEIRS
    bucket.put(layout.CLUSTER, encode(EARLIER))
    assert meet(bucket, MINE, said.append) == EARLIER
    assert said[0].startswith("taking over ") and "cluster 'a' of jo@lab, since 2023" in said[0]
    beat(bucket)
    with pytest.raises(BadInput, match="1 node live"):
        meet(bucket, MINE)
    assert bucket.list("probe") == []


def test_a_node_that_was_silent_for_long_does_not_live(file_url: str) -> None:
    bucket = open_bucket(file_url)
    beat(bucket)
    assert live_nodes(bucket) == 1
    assert live_nodes(bucket, time.time() + 3600) == 0


def test_what_another_owners_cluster_has_left_is_refused_and_ones_own_is_told(bucket_url: str) -> None:
    bucket, said = open_bucket(bucket_url), list[str]()
    bucket.put(layout.CLUSTER, encode(THEIRS))
    forget_nodes(bucket, of=THEIRS.id)
    past = read_past(bucket)
    assert past == replace(PAST, ended_at=past.ended_at if past else 0.0)
    with pytest.raises(
        BadInput, match="holds the jobs and checkpoints of cluster 'a' of kim@lab, down since"
    ) as refused:
        meet(bucket, MINE)
    assert "gpuctl attach" in refused.value.hint
    clusters.remember(KnownCluster(name="a", provider="aws", bucket=bucket_url, id=PAST.id))
    assert meet(bucket, MINE) is None, "who attached goes on with them"
    clusters.forget("a")
    assert meet(bucket, MINE) is None, "also once the note is of the new cluster"
    bucket.put(layout.PAST, encode(replace(PAST, owner=MINE.owner)))
    assert meet(bucket, MINE, said.append) is None and not said, "the same name is no news"
    assert meet(bucket, replace(MINE, name="b"), said.append) is None
    assert "cluster 'a' of jo@lab, down since 2023-11-14 22:13 UTC" in said[0]


@pytest.mark.parametrize("record", [THEIRS, EARLIER, PAST])
def test_no_cluster_is_above_or_below_another(bucket_url: str, record: ClusterSpec | PastCluster) -> None:
    key = layout.PAST if isinstance(record, PastCluster) else layout.CLUSTER
    bucket = open_bucket(bucket_url)
    bucket.at("x/deeper").put(key, encode(record))
    with pytest.raises(BadInput, match=r"below .*/x(\?\S*)?, deeper has .*cluster 'a' of"):
        meet(bucket.at("x"), MINE)
    with pytest.raises(BadInput, match=r"is below .*/x/deeper(\?\S*)?, which has .*cluster 'a' of"):
        meet(bucket.at("x/deeper/still/more"), MINE)
    assert meet(bucket.at("x/beside"), MINE) is None


def test_how_many_nodes_of_a_neighbour_live_is_told(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    theirs = bucket.at("x/deeper")
    theirs.put(layout.CLUSTER, encode(THEIRS))
    theirs.put(layout.node("n"), encode(NodeRecord(node="n", incarnation="i", beat=1, address="10.0.0.1", port=1)))
    for place in ("x", "x/deeper/still"):
        with pytest.raises(BadInput, match=r"cluster 'a' of kim@lab, since .*, 1 node live;"):
            meet(bucket.at(place), MINE)


def test_a_prefix_above_is_found_however_the_url_is_written(s3_url: str) -> None:
    bucket = open_bucket(s3_url)
    bucket.at("x").put(layout.CLUSTER, encode(THEIRS))
    base, _, query = s3_url.partition("?")
    with pytest.raises(BadInput, match=r"is below .*/x(\?\S*)?, which has cluster 'a' of"):
        meet(open_bucket(f"{base}/x%2Fdeeper?{query}"), MINE)


def test_what_ones_own_cluster_has_left_may_be_near(file_url: str) -> None:
    bucket = open_bucket(file_url)
    bucket.at("x").put(layout.PAST, encode(replace(PAST, owner=MINE.owner)))
    assert meet(bucket, MINE) is None
    assert meet(bucket.at("x/deeper"), MINE) is None


@pytest.mark.parametrize("folder", ["nodes", "net", "rank0"])
def test_a_cluster_below_outlives_the_one_above(file_url: str, folder: str) -> None:
    """An older gpuctl has let it be there."""
    bucket = open_bucket(file_url)
    bucket.put(layout.CLUSTER, encode(MINE))
    bucket.put(f"{folder}/{layout.CLUSTER}", encode(THEIRS))
    bucket.put(f"{folder}/jobs/j1/checkpoints/x", b"weights")
    bucket.put(layout.boot_log("n"), b"")
    forget_nodes(bucket, of=MINE.id)
    left = {entry.key for entry in bucket.list("")}
    assert left == {layout.PAST, f"{folder}/{layout.CLUSTER}", f"{folder}/jobs/j1/checkpoints/x"}


def test_a_node_named_cluster_is_no_cluster(file_url: str) -> None:
    bucket = open_bucket(file_url)
    bucket.put(layout.CLUSTER, encode(MINE))
    beat(bucket, "cluster")
    forget_nodes(bucket, of=MINE.id)
    assert [entry.key for entry in bucket.list("")] == [layout.PAST]


def test_who_was_quicker_is_neither_forgotten_nor_replaced(file_url: str) -> None:
    bucket = open_bucket(file_url)
    assert meet(bucket, MINE) is None
    bucket.put(layout.CLUSTER, encode(EARLIER))
    forget_nodes(bucket, of=MINE.id)
    with pytest.raises(BadInput, match="holds cluster 'a' of jo@lab"):
        agree_on_spec(bucket, MINE, {})
    assert [entry.key for entry in bucket.list("")] == [layout.CLUSTER]


def beat(bucket: Bucket, node: str = "n") -> None:
    bucket.put(layout.node(node), encode(NodeRecord(node=node, incarnation="i", beat=1, address="10.0.0.1", port=1)))
