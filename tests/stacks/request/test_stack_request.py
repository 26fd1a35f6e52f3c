"""What a request refuses, and the names that it makes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.catalog.instance_types import CloudName
from tests.fakes.requests import asked

LONG = "a-cluster-whose-name-is-long-1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": "Demo"}, "'Demo' cannot name machines"),
        ({"cluster": "a" * 31}, "cannot name machines"),
        ({"nodes_min": 5}, "5:4 is not a number of nodes"),
        ({"ssh_from": "everywhere"}, "'everywhere' is not a network"),
        ({"ssh_from": "203.0.113.7/24"}, "is not a network"),
        ({"ssh_from": "0.0.0.0/0"}, "0.0.0.0/0 allows everybody"),
        ({"ssh_from": "2001:db8::/64"}, "is IPv6, but nodes have IPv4 only"),
        ({"bucket": "gs://mine"}, "'gs://mine' is not a bucket of aws; for example s3://bucket/prefix"),
        ({"bucket": "s3://"}, "is not a bucket of aws"),
    ],
)
def test_bad_input_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as refused:
        asked("aws", **changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_one_address_is_a_network_of_one() -> None:
    """AWS refuses it without its mask, half-way through an ``up``."""
    assert asked("aws", ssh_from="203.0.113.7").ssh_from == "203.0.113.7/32"


def test_a_container_without_its_account_is_refused() -> None:
    with pytest.raises(BadInput, match="names no storage account; add \\?account_name="):
        asked("azure", bucket="az://mine/runs")


def test_a_bucket_that_was_given_without_a_prefix_gets_the_clusters_name_as_one() -> None:
    assert asked("aws", bucket="s3://mine?region=eu-west-1").given_bucket() == ("mine", "demo", {"region": "eu-west-1"})
    assert asked("aws", bucket="s3://mine/a/b/").given_bucket() == ("mine", "a/b", {"region": "us-east-1"})


@pytest.mark.parametrize("url", ["s3://mine/te%61m/x", "s3://mine/team%2Fx/", "s3://mine/team/x"])
def test_a_prefix_is_the_same_however_its_url_is_written(url: str) -> None:
    """Nodes are given rights to it as the store knows it: to ``te%61m`` they would read nothing."""
    request = asked("aws", bucket=url)
    assert request.place().prefix == "team/x"
    assert request.bucket_url() == "s3://mine/team/x?region=us-east-1"


def test_a_space_in_a_prefix_is_one_in_the_nodes_rights_and_none_in_the_url() -> None:
    request = asked("gcp", bucket="gs://mine/a run%20(2)")
    assert (request.place().prefix, request.bucket_url()) == ("a run (2)", "gs://mine/a%20run%20(2)")


@pytest.mark.parametrize("prefix", ["*", "team-*", "te%3Fm", "${aws:username}", 'a"b', "a\\b", "%ff"])
def test_a_prefix_that_stands_for_others_in_the_nodes_rights_is_refused(prefix: str) -> None:
    buckets: dict[CloudName, str] = {"aws": "s3://mine", "gcp": "gs://mine", "azure": "az://mine"}
    for provider, bucket in buckets.items():
        with pytest.raises(BadInput, match="has a prefix that nodes cannot be given rights to") as refused:
            asked(provider, bucket=f"{bucket}/{prefix}?account_name=lab&secret_access_key=hidden")
        assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("option", ["region", "aws_region", "AWS_REGION"])
def test_an_option_has_one_name_however_it_is_written(option: str) -> None:
    """obstore takes all of these, and none of them twice."""
    request = asked("aws", bucket=f"s3://mine/x?{option}=eu-west-1")
    assert request.bucket_url() == "s3://mine/x?region=eu-west-1"
    open_bucket(request.bucket_url())
    request = asked("azure", bucket="az://mine/x?azure_storage_account_name=lab")
    assert request.place().options == {"account_name": "lab"}


def test_what_is_no_bucket_of_the_cloud_is_told_without_its_keys() -> None:
    with pytest.raises(BadInput, match="'gs://mine' is not a bucket of aws") as refused:
        asked("aws", bucket="gs://mine?service_account_key=hidden")
    assert "hidden" not in str(refused.value)


def test_the_mark_tells_apart_what_is_not_the_same() -> None:
    marks = [
        asked("aws").mark(),
        asked("aws", account="210987654321").mark(),
        asked("aws", region="us-west-2").mark(),
        asked("aws", cluster="other").mark(),
        asked("gcp", account="123456789012", region="us-east-1").mark(),
    ]
    assert len(set(marks)) == len(marks)
    assert asked("aws", nodes_max=8).mark() == marks[0]


@pytest.mark.parametrize("most", [30, 57, 63])
@pytest.mark.parametrize("cluster", ["a", "demo", LONG])
def test_a_name_is_no_longer_than_it_may_be(cluster: str, most: int) -> None:
    name = asked("gcp", cluster=cluster).named(most)
    assert len(name) <= most
    assert re.fullmatch(r"gpuctl-[a-z0-9-]*[a-z0-9]", name)


def test_long_names_that_begin_alike_are_told_apart() -> None:
    assert asked("gcp", cluster=LONG).named(30) != asked("gcp", cluster=LONG[:-1] + "2").named(30)


def test_tags_that_nobody_told_are_left_out() -> None:
    assert asked("aws", owner="", version="", created="").tags() == {"gpuctl:cluster": "demo"}


def test_no_cluster_has_the_resource_group_that_keeps_anothers_bucket() -> None:
    with pytest.raises(BadInput, match="'mine-kept' is reserved for buckets that gpuctl keeps"):
        asked("azure", cluster="mine-kept")
