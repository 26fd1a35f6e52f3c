"""Storage accounts that ``down`` has left on Azure: listed and deleted, in a subscription that keeps Azure's rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.azure.cleanup.kept_buckets import buckets, remove
from tests.fakes.azure.api import Api, recorded, serving
from tests.fakes.azure.cloud import ROOT, Subscription
from tests.fakes.requests import asked

GROUP = "resourceGroups/gpuctl-demo-eastus-kept"
ACCOUNT = f"{GROUP}/providers/Microsoft.Storage/storageAccounts/gpuctldemo0123456789"
TAGS = {
    "gpuctl:cluster": "demo",
    "gpuctl:id": "0123456789",
    "gpuctl:owner": "me@laptop",
    "gpuctl:created": "2026-11-21",
}
EAST: dict[str, Any] = {"location": "eastus"}
BUCKET = KeptBucket(
    cluster="demo",
    url="az://gpuctl/demo?account_name=gpuctldemo0123456789",
    name="gpuctldemo0123456789",
    region="eastus",
    cluster_id="0123456789",
    owner="me@laptop",
    created="2026-11-21",
    group="gpuctl-demo-eastus-kept",
)


@pytest.fixture
def there() -> Subscription:
    there = Subscription()
    there.put(GROUP, **EAST, tags=TAGS)
    there.put(ACCOUNT, **EAST, tags=TAGS)
    there.put(f"{ACCOUNT}/blobServices/default/containers/gpuctl")
    there.put("resourceGroups/gpuctl-demo", **EAST, tags=TAGS)
    there.put("resourceGroups/theirs", **EAST)
    there.put("resourceGroups/theirs/providers/Microsoft.Storage/storageAccounts/theirs", **EAST)
    there.put("resourceGroups/gpuctl-old-eastus-kept", **EAST)  # as ours are called, and without our tag
    there.put("resourceGroups/gpuctl-old-eastus-kept/providers/Microsoft.Storage/storageAccounts/old", **EAST)
    return there


@pytest.fixture
def api(there: Subscription) -> Iterator[Api]:
    with serving(recorded("subscription"), there.live) as served:
        yield served


def gone(api: Api, bucket: KeptBucket = BUCKET) -> None:
    remove(bucket, api.account(), lambda _: None, lambda: 0.0)


def test_accounts_that_gpuctl_made_are_listed_with_whose_they_are(api: Api) -> None:
    assert buckets(["all"], None, api.account()) == [BUCKET]
    assert buckets(["eastus"], "demo", api.account()) == [BUCKET]
    assert buckets([], "other", api.account()) == []
    assert buckets(["westeurope"], None, api.account()) == []
    with pytest.raises(BadInput, match=r"unknown region .East US. on Azure; did you mean eastus\?"):
        buckets(["East US"], None, api.account())


def test_the_url_is_the_one_that_a_new_cluster_is_given(api: Api, there: Subscription) -> None:
    request = asked("azure", cluster="fresh")
    group = "resourceGroups/gpuctl-fresh-eastus-kept"
    there.put(group, **EAST, tags={"gpuctl:cluster": "fresh"})
    there.put(f"{group}/providers/Microsoft.Storage/storageAccounts/{request.account_name()}", **EAST)
    (found,) = buckets([], "fresh", api.account())
    assert (found.url, found.missing) == (request.bucket_url(), True)
    there.put(
        f"{group}/providers/Microsoft.Storage/storageAccounts/{found.name}/blobServices/default/containers/gpuctl"
    )
    (found,) = buckets([], "fresh", api.account())
    assert (found.url, found.missing) == (request.bucket_url(), False)


def test_a_group_whose_account_never_came_to_be_is_listed_and_goes(api: Api, there: Subscription) -> None:
    there.put("resourceGroups/gpuctl-fresh-eastus-kept", **EAST, tags={"gpuctl:cluster": "fresh"})
    (found,) = buckets([], "fresh", api.account())
    assert found.name == asked("azure", cluster="fresh").account_name()
    gone(api, found)
    assert buckets([], "fresh", api.account()) == []


def test_the_account_goes_with_its_group_and_nothing_else(api: Api, there: Subscription) -> None:
    before = there.paths()
    there.looks = 2
    gone(api)
    assert before - there.paths() == {path for path in before if path.startswith(GROUP.lower())}
    gone(api)  # what is gone already is no failure


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group": "theirs"}, "gpuctl did not create the resource group theirs for demo"),
        (
            {"group": "gpuctl-old-eastus-kept"},
            "gpuctl did not create the resource group gpuctl-old-eastus-kept for demo",
        ),
        ({"group": "gpuctl-demo"}, "gpuctl did not create the resource group gpuctl-demo for demo"),
        ({"cluster": "other"}, "gpuctl did not create the resource group gpuctl-demo-eastus-kept for other"),
        ({"cluster_id": "aaaaaaaaaa"}, "gpuctl did not create the resource group gpuctl-demo-eastus-kept for demo"),
        ({"name": "another"}, "the resource group gpuctl-demo-eastus-kept holds more than the bucket: "),
    ],
)
def test_what_is_not_that_clusters_is_refused(api: Api, there: Subscription, changed: Any, said: str) -> None:
    before = there.paths()
    with pytest.raises(BadInput, match=said):
        gone(api, replace(BUCKET, **changed))
    assert there.paths() == before


@pytest.mark.parametrize("what", ["Microsoft.Storage/storageAccounts/second", "Microsoft.KeyVault/vaults/somebodys"])
def test_a_group_that_holds_something_else_is_refused(api: Api, there: Subscription, what: str) -> None:
    there.put(f"{GROUP}/providers/{what}", **EAST)
    with pytest.raises(BadInput, match=f"holds more than the bucket: .* {what.rpartition('/')[2]}; move that"):
        gone(api)
    assert there.storage(BUCKET.name)


def test_a_locked_account_is_told_in_azures_words(api: Api, there: Subscription) -> None:
    there.locked.add(f"{ROOT}/{ACCOUNT}".lower())
    with pytest.raises(GpuctlError, match="Azure refused: ScopeLocked: "):
        gone(api)
    assert there.storage(BUCKET.name)
