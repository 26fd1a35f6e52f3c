"""What ``leaks`` finds on Azure goes and nothing else, in a subscription that keeps Azure's rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.clouds.azure.cleanup.deletions import PATIENCE_S
from gpuctl.stacks.clouds.azure.cleanup.leaks import scan
from gpuctl.stacks.clouds.azure.cleanup.removal import remove
from gpuctl.stacks.clouds.azure.ids import type_of
from tests.fakes.azure.api import Api, forbidden, recorded, serving
from tests.fakes.azure.cloud import ROOT, Subscription

HOME = "resourceGroups/gpuctl-demo"
KEPT = "resourceGroups/gpuctl-demo-eastus-kept"
THEIRS = "resourceGroups/theirs"
TAGS = {
    "gpuctl:cluster": "demo",
    "gpuctl:id": "0123456789",
    "gpuctl:owner": "me@laptop",
    "gpuctl:created": "2026-11-21",
}
WORDS = "of the gpuctl cluster demo (0123456789)"
EAST: dict[str, Any] = {"location": "eastus"}


class Clock:
    """``pause`` lets time pass at once."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pauses = 0

    def pause(self, seconds: float) -> None:
        self.time += seconds
        self.pauses += 1

    def now(self) -> float:
        return self.time


@pytest.fixture
def there() -> Subscription:
    """A cluster with one machine, its kept bucket, and what is somebody else's."""
    there = Subscription()
    put = there.put
    put(HOME, **EAST, tags=TAGS)
    put(f"{HOME}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/gpuctl-demo", **EAST, tags=TAGS)
    group = put(f"{HOME}/providers/Microsoft.Network/networkSecurityGroups/gpuctl-demo", **EAST, tags=TAGS)
    network = put(f"{HOME}/providers/Microsoft.Network/virtualNetworks/gpuctl-demo", **EAST, tags=TAGS)
    subnet = f"{HOME}/providers/Microsoft.Network/virtualNetworks/gpuctl-demo/subnets/nodes"
    put(subnet, properties={"networkSecurityGroup": {"id": group}})
    card = {"subnet": {"id": f"{network}/subnets/nodes"}}
    sets = f"{HOME}/providers/Microsoft.Compute/virtualMachineScaleSets/gpuctl-demo"
    sku = {"name": "Standard_ND96asr_v4", "capacity": 1}
    scale_set = put(sets, **EAST, tags=TAGS, sku=sku, properties={"virtualMachineProfile": card})
    put(f"{sets}/virtualMachines/0", **EAST, sku=sku)
    put(f"{HOME}/providers/Microsoft.Compute/disks/gpuctl-demo_0_OsDisk", **EAST, sku={"name": "Premium_LRS"})
    role = put(
        "providers/Microsoft.Authorization/roleDefinitions/leave",
        properties={"roleName": f"leave the scale set {WORDS}, 9876543210", "type": "CustomRole"},
    )
    _give(there, sets, "leave", role, scale_set)
    put(KEPT, **EAST, tags=TAGS)
    account = f"{KEPT}/providers/Microsoft.Storage/storageAccounts/gpuctldemo"
    put(account, **EAST, tags=TAGS)
    _give(there, account, "objects", "contributor", f"/{account}")
    _give(there, account, "reader", "contributor", f"/{account}", "")
    put(THEIRS, **EAST)
    put(f"{THEIRS}/providers/Microsoft.Network/virtualNetworks/theirs", **EAST)
    put("resourceGroups/gpuctl-next", **EAST, tags={"gpuctl:cluster": "next"})
    return there


def _give(there: Subscription, at: str, name: str, role: str, scope: str, words: str = WORDS) -> None:
    said = {"scope": scope, "principalId": "p", "roleDefinitionId": f"/{role}", "description": words}
    there.put(f"{at}/providers/Microsoft.Authorization/roleAssignments/{name}", properties=said)


MACHINE_USAGE = {
    KEPT,
    f"{KEPT}/providers/Microsoft.Storage/storageAccounts/gpuctldemo",
    f"{KEPT}/providers/Microsoft.Storage/storageAccounts/gpuctldemo/providers/Microsoft.Authorization/roleAssignments/reader",
    THEIRS,
    f"{THEIRS}/providers/Microsoft.Network/virtualNetworks/theirs",
    "resourceGroups/gpuctl-next",
}


@pytest.fixture
def api(there: Subscription) -> Iterator[Api]:
    with serving(recorded("subscription"), there.live) as served:
        yield served


def removed(api: Api, clock: Clock | None = None, cluster: str = "demo") -> list[str]:
    """What is said."""
    clock, said = clock or Clock(), list[str]()
    found = scan([], cluster, api.account()).found
    remove(found, said.append, api.account(), clock.pause, clock.now)
    return said


def left(api: Api, cluster: str = "demo") -> set[tuple[str, str]]:
    return {(one.kind, one.id) for one in scan([], cluster, api.account()).found}


def test_a_lost_cluster_goes_and_nothing_else_does(api: Api, there: Subscription) -> None:
    there.looks = 2
    clock = Clock()
    said = removed(api, clock)
    assert left(api) == set()
    assert there.paths() == {path.lower() for path in MACHINE_USAGE}
    assert "deleted resource group gpuctl-demo" in said
    assert [line for line in said if "was not deleted" in line] == []
    assert clock.pauses >= 4, "nobody waited for Azure"


def test_machines_end_before_the_rights_that_they_write_with(api: Api) -> None:
    removed(api)
    asked = [path.partition("?")[0] for method, path, _ in api.asked if method == "DELETE"]
    assert [type_of(path).rpartition("/")[2] for path in asked[:-1]] == [
        "virtualmachinescalesets",
        "roleassignments",
        "roleassignments",
        "roledefinitions",
    ]
    assert asked[-1] == f"{ROOT}/{HOME}"


def test_what_is_gone_already_is_no_failure(api: Api, there: Subscription) -> None:
    found = scan([], "demo", api.account()).found
    there.live("DELETE", f"{ROOT}/{HOME}?api-version=1", None)
    said: list[str] = []
    clock = Clock()
    remove(found, said.append, api.account(), clock.pause, clock.now)
    assert left(api) == set()
    assert [line for line in said if "was not deleted" in line] == []
    remove(found, said.append, api.account(), clock.pause, clock.now)


def test_a_group_with_something_foreign_stays_and_ours_in_it_goes(api: Api, there: Subscription) -> None:
    there.put(f"{HOME}/providers/Microsoft.Compute/disks/my-data", **EAST, sku={"name": "Premium_LRS"})
    said = removed(api)
    assert left(api) == {("resource group", "gpuctl-demo"), ("disk", "gpuctl-demo/my-data")}
    (line,) = [line for line in said if line.startswith("resource group gpuctl-demo was not deleted: ")]
    assert "my-data" in line and line.endswith("az group delete --name gpuctl-demo deletes that too")


def test_a_group_that_a_policy_has_tagged_is_not_ours(api: Api, there: Subscription) -> None:
    there.put("resourceGroups/production", **EAST, tags=TAGS)
    there.put("resourceGroups/production/providers/Microsoft.Compute/disks/data", **EAST, sku={"name": "Premium_LRS"})
    mine = "resourceGroups/production/providers/Microsoft.Compute/disks/tagged"
    there.put(mine, **EAST, sku={"name": "Premium_LRS"}, tags=TAGS)
    said = removed(api)
    assert left(api) == {("resource group", "production"), ("disk", "production/data")}
    assert "resource group production was not deleted: gpuctl did not create it for demo" in said
    assert "disk production/data was not deleted: it does not carry the tag of demo" in said


@pytest.mark.slow
def test_another_cluster_of_the_same_name_is_left_alone(api: Api, there: Subscription) -> None:
    found = list(scan([], "demo", api.account()).found)
    for one in there.of_type("microsoft.resources/resourcegroups", "demo"):
        one["tags"] = {**TAGS, "gpuctl:id": "aaaaaaaaaa"}
    for kind in ("microsoft.compute/virtualmachinescalesets", "microsoft.network/virtualnetworks"):
        for one in there.of_type(kind):
            one["tags"] = {**TAGS, "gpuctl:id": "aaaaaaaaaa"}
    said: list[str] = []
    clock = Clock()
    remove(found, said.append, api.account(), clock.pause, clock.now)
    assert there.machines("demo") == ["0"]
    assert "resource group gpuctl-demo was not deleted: gpuctl did not create it for demo" in said


def test_the_group_of_a_kept_bucket_and_what_lies_in_it_stay(api: Api, there: Subscription) -> None:
    account = there.storage("gpuctldemo")
    assert account is not None
    forged = [
        Leftover(
            cluster="demo", kind="resource group", id="gpuctl-demo-eastus-kept", region="eastus", ref=f"{ROOT}/{KEPT}"
        ),
        Leftover(cluster="demo", kind="storage account", id="gpuctldemo", region="eastus", ref=account),
    ]
    said: list[str] = []
    clock = Clock()
    remove(forged, said.append, api.account(), clock.pause, clock.now)
    assert there.storage("gpuctldemo")
    assert len(said) == 2 and all("was not deleted" in line for line in said)
    assert [method for method, _, _ in api.asked if method == "DELETE"] == []


def test_what_azure_refuses_is_told_in_its_words(api: Api, there: Subscription) -> None:
    there.locked.add(f"{ROOT}/{HOME}/providers/Microsoft.Network/virtualNetworks/gpuctl-demo".lower())
    clock = Clock()
    said = removed(api, clock)
    assert clock.time == 0.0, "a lock does not go by itself"
    (line,) = [line for line in said if "was not deleted" in line]
    assert line.startswith("resource group gpuctl-demo was not deleted: Azure refused: ScopeLocked: ")
    assert ("resource group", "gpuctl-demo") in left(api)


def test_what_is_in_use_is_tried_again_until_it_is_not(api: Api, there: Subscription) -> None:
    """In a group that is not ours, things go one by one, whatever refers to what."""
    network = f"{THEIRS}/providers/Microsoft.Network/virtualNetworks/mine"
    subnet = there.put(f"{network}/subnets/nodes")
    there.put(network, **EAST, tags=TAGS)
    card = f"{THEIRS}/providers/Microsoft.Network/networkInterfaces/mine"
    there.put(card, **EAST, tags=TAGS, properties={"subnet": {"id": subnet}})
    said = removed(api)
    assert left(api) == set()
    assert there.paths() == {path.lower() for path in MACHINE_USAGE}
    assert [line for line in said if "was not deleted" in line] == []


@pytest.mark.slow
def test_what_stays_in_use_is_given_up_in_the_end(api: Api, there: Subscription) -> None:
    network = f"{THEIRS}/providers/Microsoft.Network/virtualNetworks/mine"
    subnet = there.put(f"{network}/subnets/nodes")
    there.put(network, **EAST, tags=TAGS)
    card = f"{THEIRS}/providers/Microsoft.Network/networkInterfaces/somebodys"
    there.put(card, **EAST, properties={"subnet": {"id": subnet}})
    clock = Clock()
    said = removed(api, clock)
    assert left(api) == {("virtual network", "theirs/mine")}
    assert PATIENCE_S <= clock.time < 3 * PATIENCE_S
    why = "Azure refused: ResourceInUse: mine is in use and cannot be deleted."
    assert f"virtual network theirs/mine was not deleted: {why}" in said


def test_what_one_may_not_delete_is_told(api: Api) -> None:
    api.by_method["DELETE"] = forbidden("Microsoft.Resources/subscriptions/resourceGroups/delete")
    said = removed(api)
    assert (
        "resource group gpuctl-demo was not deleted: these Azure credentials may not call "
        "Microsoft.Resources/subscriptions/resourceGroups/delete"
    ) in said
