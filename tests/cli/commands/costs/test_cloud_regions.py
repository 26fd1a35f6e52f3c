"""Where ``leaks`` and ``buckets`` look, by the real command line against a moto server: everywhere that was rented from
here, whatever the environment names now; and what they delete.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import boto3
import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec, PastCluster
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from tests.fakes.requests import asked
from tests.stacks.conftest import aws_account as aws_account

pytestmark = pytest.mark.usefixtures("aws_account")
HOME, AWAY = "us-east-1", "eu-west-1"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def cluster() -> str:
    return f"c{uuid.uuid4().hex[:8]}"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuctl.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def network(cluster: str, region: str) -> str:
    """Something that is left there."""
    tags = [{"ResourceType": "vpc", "Tags": [{"Key": "gpuctl:cluster", "Value": cluster}]}]
    ec2 = boto3.client("ec2", region_name=region)
    return str(ec2.create_vpc(CidrBlock="10.77.0.0/16", TagSpecifications=tags)["Vpc"]["VpcId"])


def kept(cluster: str, region: str = HOME, identity: str = "") -> str:
    """The name of a bucket that a cluster has left."""
    name = f"gpuctl-{cluster}-{uuid.uuid4().hex[:10]}"
    s3 = boto3.client("s3", region_name=region)
    where: dict[str, Any] = {} if region == HOME else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket=name, **where)
    tags = {"gpuctl:cluster": cluster, "gpuctl:id": identity or "0" * 10, "gpuctl:created": "2026-11-01"}
    s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": [{"Key": k, "Value": v} for k, v in tags.items()]})
    return name


def inside(name: str, prefix: str) -> Bucket:
    return open_bucket(f"s3://{name}/{prefix}?region={HOME}")


@pytest.mark.slow
def test_leaks_looks_wherever_this_user_has_rented(cluster: str) -> None:
    left = network(cluster, AWAY)
    regions.note_used("aws", AWAY)
    done = run("leaks", "-o", "json")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert left in [one["id"] for one in told["found"] if one["cluster"] == cluster]
    assert {one["region"]: one["why"] for one in told["looked_in"]} == {AWAY: "used before", HOME: "AWS_REGION"}
    assert {"cluster_id", "owner", "created"} <= set(told["found"][0])


@pytest.mark.slow
def test_leaks_of_a_known_cluster_looks_where_it_is(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = network(cluster, AWAY)
    last_request.remember(LastRequest(request=replace(asked("aws"), cluster=cluster, region=AWAY), terms=NodeOptions()))
    monkeypatch.setenv("AWS_REGION", HOME)
    done = run("leaks", "--cluster", cluster)
    assert left in done.stdout
    assert f"{AWAY} (where the cluster is)" in done.stderr or f"{AWAY} (cluster {cluster} is there)" in done.stderr


@pytest.mark.slow
def test_the_region_of_the_settings_is_looked_into(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``up`` rents there, on whichever machine."""
    left, name = network(cluster, AWAY), kept(cluster, AWAY)
    monkeypatch.setenv("GPUCTL_REGION", AWAY)
    where = ("--provider", "aws")
    done = run("leaks", "--cluster", cluster, *where)
    assert left in done.stdout and f"{AWAY} (GPUCTL_REGION)" in done.stderr
    assert name in run("buckets", "ls", "--cluster", cluster, *where).stdout
    done = run("down", "--by-tag", cluster, "-y", *where)
    assert f"looking in {AWAY} (GPUCTL_REGION), {HOME}; elsewhere: --region NAME" in done.stderr
    assert f"deleted VPC {left} in {AWAY}" in done.stderr
    monkeypatch.setenv("GPUCTL_REGION", "us-central1")
    assert "us-central1" not in run("leaks", "--cluster", cluster, *where).stderr, "it is of another cloud"


@pytest.mark.slow
def test_leaks_names_where_it_looked_and_why(cluster: str) -> None:
    regions.note_used("aws", AWAY)
    regions.note_used("aws", HOME)
    done = run("leaks", "--cluster", cluster)
    assert f"looked in aws: {HOME} (used before, AWS_REGION), {AWAY} (used before)\n" in done.stderr


def test_nothing_was_ever_rented_and_nothing_is_named() -> None:
    done = run("leaks")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no cloud has been used from this machine; name one: --provider aws, gcp, azure\n"


@pytest.mark.slow
def test_buckets_are_listed_with_what_is_in_them(cluster: str) -> None:
    name, away = kept(cluster), kept(cluster, AWAY)
    inside(name, cluster).put("jobs/a-1/checkpoints/part", b"12345")
    regions.note_used("aws", AWAY)
    done = run("buckets", "ls", "--cluster", cluster, "-o", "json")
    assert done.returncode == 0, done.stderr
    told = {one["name"]: one for one in json.loads(done.stdout)["buckets"]}
    assert {one: told[one]["region"] for one in told} == {name: HOME, away: AWAY}
    assert (told[name]["objects"], told[name]["bytes"], told[name]["used_by"]) == (1, 5, [])
    lines = run("buckets", "ls", "--cluster", cluster).stdout.splitlines()
    assert lines[0].split()[:3] == ["CLUSTER", "BUCKET", "REGION"] and len(lines) == 3


@pytest.mark.slow
def test_a_bucket_is_deleted_with_all_that_is_in_it(cluster: str) -> None:
    name, other = kept(cluster), kept(cluster)
    inside(name, cluster).put("jobs/a-1/checkpoints/part", b"12345")
    where = ("--provider", "aws")
    asks = run("buckets", "rm", name, *where)
    assert (asks.returncode, asks.stderr.count("there is no terminal")) == (2, 1)
    inexact = run("buckets", "rm", f"s3://{name}/{cluster}", "-y", *where)
    assert inexact.returncode == 2 and "is not the bucket's exact name" in inexact.stderr
    unknown = run("buckets", "rm", "gpuctl-nothing", "-y", *where)
    assert unknown.returncode == 2 and "no bucket of gpuctl named gpuctl-nothing" in unknown.stderr
    done = run("buckets", "rm", name, "-y", *where)
    assert (done.returncode, done.stdout) == (0, f"deleted {name}, 1 object, 5 B\n")
    left = [one["Name"] for one in boto3.client("s3").list_buckets()["Buckets"]]
    assert name not in left and other in left


@pytest.mark.slow
def test_a_bucket_that_a_cluster_uses_stays_unless_forced(cluster: str) -> None:
    name = kept(cluster)
    used = inside(name, "guest")  # of another cluster, which was given a prefix there
    used.put(layout.CLUSTER, encode(ClusterSpec(name="guest", provider="aws", nodes_min=1, nodes_max=1)))
    used.put(layout.node("n"), encode(NodeRecord(node="n", incarnation="i", beat=1, address="10.0.0.1", port=1)))
    done = run("buckets", "rm", name, "-y", "--provider", "aws")
    line = f"error: the bucket {name} is used by guest (1 node live); run `gpuctl down` first, or add --force\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert run("buckets", "rm", name, "-y", "--force", "--provider", "aws").returncode == 0


@pytest.mark.slow
def test_a_bucket_in_which_another_cluster_has_left_something_stays_unless_forced(cluster: str) -> None:
    name = kept(cluster)
    past = PastCluster(name="guest", provider="aws", id="2" * 10, owner="kim@lab", ended_at=1_700_000_000.0)
    inside(name, "guest").put(layout.PAST, encode(past))
    inside(name, cluster).put(layout.PAST, encode(replace(past, name=cluster, id="0" * 10)))
    done = run("buckets", "rm", name, "-y", "--provider", "aws")
    line = f"error: the bucket {name} is used by guest (down); to delete what that has left too, add --force\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert "guest (down)" in run("buckets", "ls", "--cluster", cluster, "--provider", "aws").stdout
    assert run("buckets", "rm", name, "-y", "--force", "--provider", "aws").returncode == 0
