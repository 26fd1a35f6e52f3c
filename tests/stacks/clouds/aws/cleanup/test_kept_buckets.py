"""The buckets that ``down`` leaves, on moto: listed by name and tag, and deleted with all that is in them."""

from __future__ import annotations

import uuid
from typing import Any

import boto3
import pytest

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import Denied, KeptBucket
from gpuctl.stacks.clouds.aws.cleanup.kept_buckets import buckets, remove
from tests.fakes.aws.recorded import answering
from tests.fakes.requests import asked

pytestmark = pytest.mark.usefixtures("aws_account")

HOME, AWAY = "us-east-1", "eu-west-1"


@pytest.fixture
def cluster() -> str:
    return f"c{uuid.uuid4().hex[:8]}"


def made(cluster: str, region: str = HOME, name: str = "", **tags: str) -> str:
    """Its name."""
    s3 = boto3.client("s3", region_name=region)
    name = name or f"gpuctl-{cluster}-{uuid.uuid4().hex[:10]}"
    place: dict[str, Any] = {} if region == HOME else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket=name, **place)
    told = {"gpuctl:cluster": cluster, **{f"gpuctl:{key}": value for key, value in tags.items()}}
    s3.put_bucket_tagging(
        Bucket=name, Tagging={"TagSet": [{"Key": key, "Value": value} for key, value in told.items()]}
    )
    return name


def kept(name: str, cluster: str, identity: str = "") -> KeptBucket:
    return KeptBucket(cluster=cluster, url=f"s3://{name}/{cluster}", name=name, region=HOME, cluster_id=identity)


def is_there(name: str) -> bool:
    return name in [one["Name"] for one in boto3.client("s3", region_name=HOME).list_buckets()["Buckets"]]


def test_buckets_of_a_cluster_are_listed_with_whose_they_are(cluster: str) -> None:
    name = made(cluster, AWAY, id="0123456789", owner="me@laptop", created="2026-11-22")
    made(f"{cluster}2")
    (found,) = buckets(["all"], cluster)
    assert found == KeptBucket(
        cluster=cluster,
        url=f"s3://{name}/{cluster}?region={AWAY}",
        name=name,
        region=AWAY,
        cluster_id="0123456789",
        owner="me@laptop",
        created="2026-11-22",
    )
    assert {one.cluster for one in buckets([], None)} >= {cluster, f"{cluster}2"}


def test_its_address_is_that_which_up_takes() -> None:
    request = asked("aws", cluster=f"c{uuid.uuid4().hex[:8]}")
    made(request.cluster, name=request.place().name)
    (found,) = buckets([], request.cluster)
    assert found.url == request.bucket_url()


@pytest.mark.slow
def test_only_the_regions_that_are_named_count(cluster: str) -> None:
    here, there = made(cluster), made(cluster, AWAY)
    assert [one.name for one in buckets([HOME], cluster)] == [here]
    assert [one.name for one in buckets([AWAY], cluster)] == [there]


def test_a_bucket_without_our_tag_or_name_is_none_of_ours(cluster: str) -> None:
    s3 = boto3.client("s3", region_name=HOME)
    untagged = f"gpuctl-{cluster}-by-hand"
    s3.create_bucket(Bucket=untagged)
    other = made(cluster, name=f"team-{cluster}")
    assert buckets([], cluster) == []
    for name in (untagged, other):
        with pytest.raises(BadInput, match=f"gpuctl did not create the bucket {name}"):
            remove(kept(name, cluster))
        assert is_there(name)


def test_another_clusters_bucket_is_not_deleted(cluster: str) -> None:
    name = made(cluster, id="1111111111")
    for one in (kept(name, "other"), kept(name, cluster, identity="2222222222")):
        with pytest.raises(BadInput, match="belongs to another cluster now"):
            remove(one)
    assert is_there(name)


def test_a_bucket_goes_with_versions_markers_and_unfinished_uploads(cluster: str) -> None:
    name = made(cluster)
    s3 = boto3.client("s3", region_name=HOME)
    s3.put_object(Bucket=name, Key="before", Body=b"1")
    s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"1", b"2"):
        s3.put_object(Bucket=name, Key="twice", Body=body)
    s3.delete_object(Bucket=name, Key="before")
    s3.create_multipart_upload(Bucket=name, Key="half")
    (found,) = buckets([], cluster)
    remove(found)
    assert not is_there(name)
    remove(found)


@pytest.mark.slow
def test_more_objects_than_one_request_may_delete_all_go(cluster: str) -> None:
    name = made(cluster)
    s3 = boto3.client("s3", region_name=HOME)
    for number in range(1005):
        s3.put_object(Bucket=name, Key=f"part-{number:04}", Body=b"")
    remove(kept(name, cluster))
    assert not is_there(name)


def test_what_s3_keeps_is_told(cluster: str) -> None:
    name = made(cluster)
    boto3.client("s3", region_name=HOME).put_object(Bucket=name, Key="model", Body=b"1")
    error = "<Error><Key>model</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    connect = answering({("s3", "DeleteObjects"): f"<DeleteResult>{error}</DeleteResult>"})
    with pytest.raises(GpuctlError, match=f"S3 keeps model in {name}: AccessDenied"):
        remove(kept(name, cluster), connect)


def test_who_may_not_list_buckets_is_told(cluster: str) -> None:
    body = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    with pytest.raises(Denied, match="may not call ListBuckets"):
        buckets([], cluster, answering({("s3", "ListBuckets"): (403, body)}))
