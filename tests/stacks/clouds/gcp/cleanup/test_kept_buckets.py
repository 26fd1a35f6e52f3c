"""Buckets that gpuctl made and ``down`` has left on Google Cloud: listed, and deleted with all that is in them."""

from __future__ import annotations

import pytest

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.gcp.cleanup.kept_buckets import buckets, remove
from gpuctl.stacks.clouds.interface import cloud
from tests.fakes.gcp.api import Google
from tests.fakes.gcp.buckets import Buckets
from tests.fakes.requests import Planned, asked

LABELS = {"gpuctl-cluster": "demo", "gpuctl-id": "0a1b2c3d4e", "gpuctl-owner": "me", "gpuctl-created": "2026-11-21"}
DEMO = KeptBucket(
    cluster="demo",
    url="gs://gpuctl-demo-1/demo",
    name="gpuctl-demo-1",
    region="us-central1",
    cluster_id="0a1b2c3d4e",
    owner="me",
    created="2026-11-21",
)


@pytest.fixture
def there(project: Google) -> Buckets:
    made = Buckets(project)
    made.add("gpuctl-demo-1", labels=LABELS)
    made.add("gpuctl-next-1", "EUROPE-WEST4", {"gpuctl-cluster": "next"})
    made.add("gpuctl-by-hand")
    made.add("photos", "US", {"owner": "us"})
    return made


@pytest.mark.slow
def test_buckets_with_our_label_are_listed_with_whose_they_are(there: Buckets) -> None:
    assert buckets(["all"], None)[0] == DEMO
    assert [one.name for one in buckets(["all"], None)] == ["gpuctl-demo-1", "gpuctl-next-1"]
    assert cloud("gcp").kept_buckets(["all"], "next")[0].url == "gs://gpuctl-next-1/next"
    assert buckets(["europe-west4"], "demo") == ()
    assert there.things.keys() >= {"photos"}


@pytest.mark.slow
def test_the_url_is_the_one_that_the_cluster_had() -> None:
    request = asked("gcp")
    name = Planned(request).one("storage/bucket:Bucket")["name"]
    assert request.bucket_url() == f"gs://{name}/{request.cluster}"


def test_a_region_that_is_none_is_one_line(there: Buckets) -> None:
    with pytest.raises(BadInput, match="unknown region 'us-centrall1'"):
        buckets(["us-centrall1"], None)
    assert there.things


def test_a_bucket_goes_with_all_that_is_in_it(there: Buckets) -> None:
    bucket = there.things["gpuctl-demo-1"]
    for number in range(8):
        bucket.write(f"demo/jobs/a 1/part{number}?#%")
    bucket.write("demo/jobs/older", 1, current=False)
    bucket.write("demo/jobs/older", 2)
    remove(DEMO)
    assert there.things.keys() == {"gpuctl-next-1", "gpuctl-by-hand", "photos"}
    remove(DEMO)


@pytest.mark.parametrize("name", ["gpuctl-by-hand", "photos", "gpuctl-next-1"])
def test_a_bucket_that_is_not_the_clusters_stays(there: Buckets, name: str) -> None:
    there.things[name].write("precious")
    with pytest.raises(BadInput, match=f"gs://{name} is not a bucket that gpuctl made for demo"):
        remove(KeptBucket(cluster="demo", url=f"gs://{name}/demo", name=name, region="us-central1"))
    assert there.things[name].objects == [("precious", 1)]


def test_what_a_policy_retains_is_told_and_the_bucket_stays(there: Buckets) -> None:
    bucket = there.things["gpuctl-demo-1"]
    bucket.write("demo/held")
    bucket.retained.add("demo/held")
    with pytest.raises(GpuctlError, match="retention policy and cannot be deleted"):
        remove(DEMO)
    assert "gpuctl-demo-1" in there.things
