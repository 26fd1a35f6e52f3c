"""``up``, ``repair`` and ``down`` of a cluster on Azure by the real command line: the real engine and program, with a
program that stands in for Pulumi's CLI (``pulumi_cli``), Azure's REST API on loopback with a subscription that holds
what is made (``azure_cloud``), and Azurite behind its storage (``azure_blobs``). The test plays the machines.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import ownership
from gpuctl.stacks.request.stack_request import StackRequest
from tests.fakes.azure import api as azure_api
from tests.fakes.azure import blobs
from tests.fakes.azure.api import SUBSCRIPTION, Api, recorded
from tests.fakes.azure.cloud import NO_ROOM, NOT_HEARD_OF, Subscription
from tests.fakes.pulumi.resources_azure import USER
from tests.fakes.stores import azurite
from tests.fakes.user import User
from tests.stacks.rented import interruptions, losses, two_users

TYPE = "Standard_ND96asr_v4"
EAST = "eastus"

_AZ = """#!/bin/sh
case "$*" in
*storage.azure.com*) token={storage} ;;
*) token={api} ;;
esac
echo '{{"accessToken": "'$token'", "expiresOn": "2099-01-01 00:00:00.000000", "expires_on": 4070908800,
"subscription": "{subscription}", "tenant": "t", "tokenType": "Bearer"}}'
"""


class Account(User):
    """Of Azure, logged in with ``az``."""

    def __init__(self, folder: Path, there: Subscription, api: Api, storage: str, patch: pytest.MonkeyPatch) -> None:
        self.there = there
        self.api = api
        self._storage = storage
        self._patch = patch
        super().__init__(folder, {})
        key = folder / "key.pub"
        key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@laptop\n")
        self.up_flags = ("--provider", "azure", "--type", TYPE, "--ssh-key", str(key))
        tool = folder / "bin" / "az"
        tool.write_text(_AZ.format(storage=blobs.TOKEN, api=azure_api.TOKEN, subscription=SUBSCRIPTION))
        tool.chmod(0o755)
        profile = {"subscriptions": [{"id": SUBSCRIPTION, "isDefault": True}]}
        (folder / "azureProfile.json").write_text(json.dumps(profile), "utf-8-sig")
        self._environment = {
            "PATH": self.env["PATH"],
            "AZURE_CONFIG_DIR": str(folder),
            "AZURE_TOKEN_CREDENTIALS": "AzureCliCredential",
            "ARM_ENDPOINT": api.url,
            "GPUCTL_STATE_DIR": self.env["GPUCTL_STATE_DIR"],
        }
        self.go_to(EAST)

    def go_to(self, region: str) -> None:
        """From now on its storage is looked for in ``region``: the names of Azure's own hosts have the account in
        them, and a test has one host."""
        request = StackRequest(
            cluster=self.cluster,
            provider="azure",
            type=TYPE,
            nodes_min=1,
            nodes_max=1,
            region=region,
            account=SUBSCRIPTION,
        )
        self.look_at(request.account_name())

    def look_at(self, storage_account: str) -> None:
        self._environment["AZURE_STORAGE_ENDPOINT"] = f"{self._storage}/{storage_account}"
        self.env.update(self._environment)
        for name, value in self._environment.items():  # the test looks into the bucket as the same user
            self._patch.setenv(name, value)

    def machines(self) -> list[str]:
        return self.there.machines(self.cluster)

    def delete_bucket(self) -> None:
        self.there.delete(f"resourceGroups/gpuctl-{self.cluster}-{EAST}-kept")

    def size(self) -> int:
        return int(self.there.scale_set(self.cluster)["sku"]["capacity"])

    def told(self) -> str:
        """What machines are told when they boot."""
        profile = self.there.scale_set(self.cluster)["properties"]["virtualMachineProfile"]
        return str(profile["osProfile"]["customData"])

    def rules(self) -> list[dict[str, Any]]:
        (group,) = self.there.of_type("microsoft.network/networksecuritygroups", self.cluster)
        return list(group["properties"]["securityRules"])


@pytest.fixture
def account(azurite_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    containers: set[str] = set()

    def made(id_: str) -> None:
        found = re.search(r"/storageAccounts/(\w+)/.*/containers/([^/]+)$", id_)
        if found:
            name = "-".join(found.groups())
            if name in containers:  # of an account that is gone
                azurite.delete(azurite_endpoint, name)
            azurite.create(azurite_endpoint, name)
            containers.add(name)

    there = Subscription(made)
    answers = recorded("subscription") | recorded("checks") | _IMAGES
    for provider in ("Compute", "Network"):
        usages = f"providers/Microsoft.{provider}/locations/{{}}/usages"
        answers[usages.format("westeurope")] = answers[usages.format(EAST)]
    with (
        azure_api.serving(answers, there.live) as api,
        blobs.serving(azurite_endpoint, there) as storage,
        Account(tmp_path, there, api, storage, monkeypatch) as account,
    ):
        yield account


_IMAGES = {
    f"providers/Microsoft.Compute/locations/{region}/publishers/microsoft-dsvm/artifacttypes/vmimage/offers/ubuntu-hpc"
    "/skus/2404/versions": [200, [{"id": "1", "name": name, "location": region} for name in ("24.04.9", "24.04.10")]]
    for region in (EAST, "westeurope")
}


@pytest.mark.slow
def test_up_makes_machines_that_find_gpuctl_in_the_bucket_and_down_leaves_the_bucket_alone(account: Account) -> None:
    account.boot_machines()
    done = account.up()
    assert f"cluster {account.cluster} is up: 2 nodes (azure)" in done.stdout
    assert "waiting for the new bucket" in done.stderr
    assert account.size() == 2
    assert all(f"{name} is live" in done.stderr for name in account.machines())
    assert all(f"{name} " in account.run("status").stdout for name in account.machines())
    spec = account.spec()
    assert (spec.name, spec.provider, spec.nodes_max, spec.slots) == (account.cluster, "azure", 2, 8)
    bucket = account.bucket()
    (wheel,) = [entry.key for entry in bucket.list(layout.BOOT) if entry.key.endswith(".whl")]
    assert wheel in account.last_up()["user_data"], "the machines are told of another wheel than the one that is there"

    found = account.run("leaks", "--provider", "azure", code=1).stdout
    assert all(f"{account.cluster}/gpuctl-{account.cluster}/{number}" in found for number in (0, 1))
    bucket.put("jobs/a-1/checkpoints/part", b"kept")
    done = account.run("down", "-y")
    assert done.stdout.splitlines()[0] == f"cluster {account.cluster} is down"
    for flags, looked in (([], f"{EAST} (used before, last used)"), (["--all-regions"], "all regions")):
        done = account.run("leaks", "--provider", "azure", *flags)
        assert (done.stdout, done.stderr) == ("", f"looked in azure: {looked}\nnothing is left\n")
    assert [entry.key for entry in bucket.list("")] == ["jobs/a-1/checkpoints/part", "past.json"]
    assert account.run("status", code=2).stderr.startswith(f"error: no cluster named '{account.cluster}'")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("way", "goes_on"), interruptions.every_way("azure"))
def test_up_that_broke_off_at_any_resource_leaves_nothing(
    account: Account, way: interruptions.Way | None, goes_on: bool
) -> None:
    account.boot_machines()
    interruptions.at_every_resource(account, way, goes_on=goes_on)


@pytest.mark.slow
@pytest.mark.parametrize("lose", losses.ALL)
def test_machines_go_whatever_else_is_gone(account: Account, lose: Callable[[User], None]) -> None:
    losses.machines_go_all_the_same(account, lose)


@pytest.mark.parametrize("way", interruptions.A_FEW)
def test_up_that_broke_off_at_its_scale_set_leaves_nothing(account: Account, way: Callable[[User, str], None]) -> None:
    interruptions.at_one(account, way, f"create azure-native:compute:VirtualMachineScaleSet {account.cluster}")


@pytest.mark.slow
def test_it_grows_shrinks_is_repaired_and_comes_back_with_the_bucket_that_down_has_left(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    (first,) = account.machines()
    token = account.spec().token
    told, sent = account.told(), len(account.api.asked)
    account.up("--idle-minutes", "60", "--ssh-from", "203.0.113.7/32", nodes="1:3")
    assert len(account.machines()) == 3 and first in account.machines()
    assert account.spec().token == token
    assert account.told() != told, "new machines are told what the old ones were"
    (rule,) = [one for one in account.rules() if one["name"] == "ssh"]
    assert rule["sourceAddressPrefix"] == "203.0.113.7/32"
    # All of the set is sent, with the number that it had; then it is asked to grow.
    sizes = [int(body["sku"]["capacity"]) for _, _, body in account.api.asked[sent:] if body and "sku" in body]
    assert sizes == [1, 3]
    assert account.declared("VirtualMachineScaleSet")["sku"]["capacity"] == 1

    account.there.take(account.cluster, account.machines()[1])
    account.there.take(account.cluster, account.machines()[1])
    assert account.size() == 1
    assert account.run("repair", "-y").stdout == f"cluster {account.cluster} is complete\n"
    assert len(account.machines()) == 3 and first in account.machines()
    account.run("up", "-y", "--nodes", "2")
    assert len(account.machines()) == 2 and first in account.machines()

    url = account.known().bucket
    account.run("down", "-y")
    account.boot_machines()  # the new scale set's machines have the names of the old one's
    account.up(nodes="1")
    assert account.known().bucket == url
    account.run("down", "-y", "--delete-checkpoints", account.cluster)
    with pytest.raises(GpuctlError):  # it is gone, though its tag has the first one's identity
        open_bucket(url, patience_s=0.0).list("")


@pytest.mark.slow
def test_a_scale_set_that_was_deleted_is_made_anew_and_waited_for(account: Account) -> None:
    """Its machines have the names of the old one's, which have told that they live."""
    account.boot_machines()
    account.up(nodes="1")
    old = account.machines()
    account.there.live("DELETE", account.there.scale_set(account.cluster)["id"], None)
    account.boot_machines(lambda _name: False)
    done = account.run("repair", "-y", code=1)
    assert account.machines() == old
    assert done.stderr.splitlines()[-1].startswith(f"error: {old[0]} could not boot: ")


@pytest.mark.slow
def test_a_role_that_azure_has_not_heard_of_everywhere_is_given_once_more(account: Account) -> None:
    account.boot_machines()
    account.there.unheard_of = 1
    done = account.up(nodes="1")
    (role,) = account.there.of_type("microsoft.authorization/roledefinitions")
    said = f'Status=404 Code="RoleDefinitionDoesNotExist" Message="{NOT_HEARD_OF.format(role["name"])}"'
    refused = f"azure-native:authorization:RoleAssignment {account.cluster}-leave (create) failed: {said}"
    again = [line for line in done.stderr.splitlines() if "trying again" in line]
    assert again == [f"{refused}; trying again in 5 s"]
    assert f"cluster {account.cluster} is up: 1 node (azure)" in done.stdout
    given = account.there.of_type("microsoft.authorization/roleassignments")
    (scope,) = [one["properties"]["scope"] for one in given if one["properties"]["roleDefinitionId"] == role["id"]]
    assert scope == account.there.scale_set(account.cluster)["id"]
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "azure").stdout == ""


@pytest.mark.slow
def test_checkpoints_that_never_had_a_bucket_need_not_be_deleted(account: Account) -> None:
    account.obstacles.refuse(f"create azure-native:resources:ResourceGroup {account.cluster}-kept")
    account.up(code=1)
    done = account.run("down", "-y", "--delete-checkpoints", account.cluster)
    why = f"the bucket az://gpuctl/{account.cluster} did not answer for '': the connection broke"
    assert done.stdout.splitlines() == [
        f"cluster {account.cluster} is down",
        f"no checkpoints to delete: there is no bucket of {account.cluster} on azure ({why})",
    ]
    assert not account.there.paths()


@pytest.mark.slow
def test_a_region_without_machines_says_why_and_another_one_may_have_them(account: Account) -> None:
    account.boot_machines()
    account.there.without.append(EAST)
    line = account.up("--wait", "0.01", code=1).stderr.splitlines()[-1]
    assert line == (
        f"error: 0 of 2 machines started within 0.01 minutes: AllocationFailed: {NO_ROOM}; wait longer (--wait), use "
        "another --region or --type, or --on-demand "
        "(remaining: 1 identity, 1 resource group, 1 role and 5 more, $0.00/h; "
        f"`gpuctl down --cluster {account.cluster}` removes it)"
    )
    assert account.size() == 0, "a machine may come, though nobody waits for it"
    url = account.known().bucket
    said = account.up("--region", "westeurope").stderr
    assert "eastus is cleaned up" in said and account.known().bucket == url
    assert account.there.scale_set(account.cluster)["location"] == "westeurope"
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "azure").stdout == ""


@pytest.mark.slow
def test_after_down_it_may_come_back_in_another_region(account: Account) -> None:
    """Azure lets no resource group move, and the one of the bucket stays."""
    account.boot_machines()
    account.up(nodes="1")
    account.run("down", "-y")
    account.go_to("westeurope")
    account.boot_machines()
    account.up("--region", "westeurope", nodes="1")
    assert account.there.scale_set(account.cluster)["location"] == "westeurope"
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "azure").stdout == ""


@pytest.mark.slow
def test_what_pulumi_does_not_know_of_is_found_by_its_tag_and_fails_down(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    account.there.put("resourceGroups/theirs", location=EAST)
    disk = account.there.put(
        "resourceGroups/theirs/providers/Microsoft.Compute/disks/by-hand",
        location=EAST,
        tags={"gpuctl:cluster": account.cluster},
        sku={"name": "Premium_LRS"},
        properties={"diskSizeGB": 256, "diskState": "Unattached"},
    )
    done = account.run("down", "-y", code=1)
    assert done.stdout == "left: disk theirs/by-hand in eastus, $0.05207/h\n"
    assert done.stderr.splitlines()[-1] == (
        f"error: 1 thing could not be removed; run `gpuctl down --cluster {account.cluster}` again,"
        " or remove whatever has its name: "
        f"gpuctl down --by-tag {account.cluster} --provider azure --region {EAST}"
    )
    account.there.live("DELETE", disk, None)
    again = account.run("down", "-y")
    assert f"there is no stack of {account.cluster}" in again.stderr
    assert again.stdout.splitlines()[0] == f"cluster {account.cluster} is down"


@pytest.mark.slow
def test_what_the_subscription_may_not_have_is_not_begun(account: Account) -> None:
    usages = account.api.answers["providers/microsoft.compute/locations/eastus/usages"]
    (spot,) = [one for one in usages if one["name"]["value"] == "lowPriorityCores"]
    spot["limit"] = 0
    done = account.up(code=2)
    line = (
        f"error: quota: Total Regional Spot vCPUs is 0: this subscription may not start any {TYPE} (spot); see https://"
    )
    assert line in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: azure would refuse these machines; ")
    assert {method for method, _, _ in account.api.asked} == {"GET"}
    assert not (account.folder / "state" / "pulumi").exists()


@pytest.mark.slow
def test_what_is_not_said_again_stays_as_it_was(account: Account) -> None:
    account.boot_machines()
    account.up("--zone", "2", "--on-demand", "--idle-minutes", "60", nodes="1:2")
    before = set(account.machines())
    again = account.run("up", "-y", "--nodes", "1:3")
    assert again.stdout.startswith("nodes: 1:2 -> 1:3\ntotal: $"), "what changes, and not the whole plan again"
    assert before < set(account.machines()) and len(account.machines()) == 3
    assert account.there.scale_set(account.cluster)["zones"] == ["2"]
    assert (account.last_up()["spot"], account.last_up()["zones"]) == (False, ["2"])
    assert (account.spec().idle_minutes, account.spec().nodes_max) == (60, 3)

    refused = account.run("up", "-y", "--spot", code=2).stderr.splitlines()[-1]
    hint = f"run `gpuctl down --cluster {account.cluster}` first, or choose another name with --cluster"
    assert refused == f"error: {account.cluster} has machines on demand, not as spot; {hint}"
    assert len(account.machines()) == 3


@pytest.mark.slow
def test_an_account_without_a_container_that_an_interrupted_up_left_is_in_nobodys_way(account: Account) -> None:
    """As it was when the machines' identity was what was just being created."""
    tags = _tags(account, ownership.me(), "0123456789")
    group = _kept_group(account)
    account.there.put(group, location=EAST, tags=tags)
    account.there.put(f"{group}/providers/Microsoft.Storage/storageAccounts/other", location=EAST, tags=tags)
    account.boot_machines()
    assert f"removing gpuctl-{account.cluster}-{EAST}-kept: an interrupted" in account.up(nodes="1").stderr
    assert account.there.storage("other") is None and account.bucket().list("nodes/")
    assert "removing" not in account.up(nodes="1").stderr


@pytest.mark.slow
@pytest.mark.parametrize("role", ["", "new"])
def test_a_bucket_that_its_maker_may_not_read_yet_is_used(account: Account, azurite_endpoint: str, role: str) -> None:
    """An interrupted ``up`` had made the bucket, and not the role; or a moment ago."""
    container = _left_bucket(account, owner="me@laptop", id_="0123456789")
    azurite.create(azurite_endpoint, f"{container.split('/')[-5]}-gpuctl")
    if role:
        given = {"scope": container, "principalId": USER, "roleDefinitionId": f"/{blobs.DATA_CONTRIBUTOR}"}
        account.there.put("providers/Microsoft.Authorization/roleAssignments/of-the-user", properties=given)
    last = account.up(nodes="1", code=2)
    assert "holds the bucket of me@laptop's cluster" in last.stderr and "gpuctl buckets rm" in last.stderr
    assert [path for path in account.there.paths() if "virtualmachinescalesets" in path.lower()] == []
    account.there.put(_kept_group(account), location=EAST, tags=_tags(account, ownership.me(), "0123456789"))

    account.obstacles.refuse(f"create azure-native:compute:VirtualMachineScaleSet {account.cluster}")
    account.up(nodes="1", code=1)
    account.obstacles.forget()
    account.boot_machines()
    account.up(nodes="1")
    assert account.there.storage(account.known().bucket.partition("account_name=")[2], "gpuctl") == container
    assert account.bucket().list("nodes/")
    readers = [
        one["properties"]["scope"]
        for one in account.there.of_type("microsoft.authorization/roleassignments")
        if one["properties"]["principalId"] == USER
    ]
    assert readers == [container]
    account.up(nodes="1")


def _left_bucket(account: Account, *, owner: str, id_: str) -> str:
    """The id of a container that an earlier ``up`` has made, and nothing else; its resource group says whose."""
    name = StackRequest(
        cluster=account.cluster,
        provider="azure",
        type=TYPE,
        nodes_min=1,
        nodes_max=1,
        region=EAST,
        account=SUBSCRIPTION,
    ).account_name()
    group = _kept_group(account)
    account.there.put(group, location=EAST, tags=_tags(account, owner, id_))
    at = f"{group}/providers/Microsoft.Storage/storageAccounts/{name}"
    account.there.put(at, location=EAST)
    return account.there.put(f"{at}/blobServices/default/containers/gpuctl")


def _kept_group(account: Account) -> str:
    return f"resourceGroups/gpuctl-{account.cluster}-{EAST}-kept"


def _tags(account: Account, owner: str, id_: str) -> dict[str, str]:
    return {"gpuctl:cluster": account.cluster, "gpuctl:id": id_, "gpuctl:owner": owner}


@pytest.mark.slow
def test_nodes_are_let_into_a_bucket_of_ones_own_wherever_it_is(account: Account, azurite_endpoint: str) -> None:
    lab = "resourceGroups/Lab-Data/providers/Microsoft.Storage/storageAccounts/lab"
    account.there.put("resourceGroups/Lab-Data", location=EAST)
    account.there.put(lab, location=EAST)
    container = account.there.put(f"{lab}/blobServices/default/containers/box")
    azurite.create(azurite_endpoint, "lab-box")
    given = {"scope": container, "principalId": USER, "roleDefinitionId": f"/{blobs.DATA_CONTRIBUTOR}"}
    account.there.put("providers/Microsoft.Authorization/roleAssignments/of-the-user", properties=given)
    account.look_at("lab")
    for _ in range(blobs.NOT_YET + 1):  # the role was given long ago
        with contextlib.suppress(GpuctlError):
            open_bucket("az://box/runs?account_name=lab", patience_s=0.0).put("early", b"")
    account.boot_machines()
    done = account.run("up", *account.up_flags, "-y", "--bucket", "az://box/runs?account_name=la", code=2)
    assert "error: there is no storage account la in subscription" in done.stderr
    account.up("--bucket", "az://box/runs?account_name=lab", nodes="1")
    assert account.spec().name == account.cluster
    roles = [one["properties"] for one in account.there.of_type("microsoft.authorization/roleassignments")]
    assert container in [one["scope"] for one in roles if one["principalId"] != USER]
    assert not [path for path in account.there.paths() if path.endswith("-kept")]
    account.run("down", "-y")
    assert [one["name"] for one in account.there.of_type("microsoft.authorization/roleassignments")] == ["of-the-user"]
    assert account.there.storage("lab", "box") == container


@pytest.mark.slow
def test_a_second_user_changes_nothing_of_what_the_first_has_left(account: Account) -> None:
    two_users.a_second_user_changes_nothing(account)


@pytest.mark.slow
def test_it_comes_back_after_a_colleague_has_removed_it(account: Account) -> None:
    two_users.it_comes_back_after_a_colleague_has_removed_it(account)


@pytest.mark.slow
def test_a_stale_note_makes_nothing_beside_a_namesake(account: Account) -> None:
    two_users.a_stale_note_makes_nothing_beside_a_namesake(account)
