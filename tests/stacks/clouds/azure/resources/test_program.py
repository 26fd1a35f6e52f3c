"""What Azure would be asked for."""

from __future__ import annotations

import inspect
import ipaddress
import re
import sys
from typing import Any

import pytest
from msgspec.structs import replace
from pulumi_azure_native import compute

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.azure.resources.identity import only_below
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.plan.planner import plan
from tests.fakes.requests import Planned, asked

ND = Planned(asked("azure"))
NC = Planned(asked("azure", type="Standard_NC24ads_A100_v4"))
ON_DEMAND = Planned(asked("azure", spot=False))

SCALE_SET = "compute:VirtualMachineScaleSet"
ASSIGNMENT = "authorization:RoleAssignment"
ACCOUNT = "storage:StorageAccount"
PRINCIPAL = "principal of UserAssignedIdentity/demo"
KEPT = "gpuctl-demo-eastus-kept"


@pytest.mark.slow
def test_the_scale_set_is_uniform_and_in_one_placement_group_as_infiniband_wants() -> None:
    scale_set = ND.one(SCALE_SET)
    assert (scale_set["orchestrationMode"], scale_set["singlePlacementGroup"]) == ("Uniform", True)
    assert scale_set["sku"] == {"name": "Standard_ND96asr_v4", "tier": "Standard", "capacity": 0}


def test_machines_need_not_be_placed_together() -> None:
    assert Planned(asked("azure", placement=False)).one(SCALE_SET)["singlePlacementGroup"] is False


def test_no_more_machines_than_asked_for_are_started_and_those_that_work_are_left_alone() -> None:
    scale_set = ND.one(SCALE_SET)
    assert scale_set["overprovision"] is False
    assert scale_set["upgradePolicy"] == {"mode": "Manual"}


def test_spot_machines_are_deleted_when_they_are_taken_and_tried_to_be_restored() -> None:
    scale_set = ND.one(SCALE_SET)
    machines = scale_set["virtualMachineProfile"]
    assert (machines["priority"], machines["evictionPolicy"]) == ("Spot", "Delete")
    assert machines["billingProfile"] == {"maxPrice": -1}
    assert scale_set["spotRestorePolicy"] == {"enabled": True, "restoreTimeout": "PT1H"}


def test_on_demand_has_no_spot_at_all() -> None:
    scale_set = ON_DEMAND.one(SCALE_SET)
    assert "spotRestorePolicy" not in scale_set
    assert {"priority", "evictionPolicy", "billingProfile"} & set(scale_set["virtualMachineProfile"]) == set()


def test_zones_are_named_where_somebody_did() -> None:
    assert "zones" not in ND.one(SCALE_SET)
    assert Planned(asked("azure", zones=("2",))).one(SCALE_SET)["zones"] == ["2"]


def test_the_network_keeps_clear_of_what_machines_with_infiniband_use_within() -> None:
    (block,) = ND.one("network:VirtualNetwork")["addressSpace"]["addressPrefixes"]
    assert not ipaddress.ip_network(block).overlaps(ipaddress.ip_network("172.16.0.0/16"))
    assert ND.one("network:Subnet")["addressPrefix"] == block


def test_all_traffic_passes_between_the_nodes_and_nothing_but_the_users_ssh_comes_in() -> None:
    between, ssh = ND.one("network:NetworkSecurityGroup")["securityRules"]
    assert (between["sourceAddressPrefix"], between["protocol"], between["destinationPortRange"]) == (
        ND.one("network:Subnet")["addressPrefix"],
        "*",
        "*",
    )
    assert (ssh["sourceAddressPrefix"], ssh["protocol"], ssh["destinationPortRange"]) == ("203.0.113.7/32", "Tcp", "22")
    assert ND.one("network:Subnet")["networkSecurityGroup"] == {"id": "NetworkSecurityGroup/demo"}
    (only,) = Planned(asked("azure", ssh_from="")).one("network:NetworkSecurityGroup")["securityRules"]
    assert only == between


def test_each_machine_has_a_public_address_that_ends_with_it_and_whose_price_the_plan_shows() -> None:
    (card,) = ND.one(SCALE_SET)["virtualMachineProfile"]["networkProfile"]["networkInterfaceConfigurations"]
    (address,) = card["ipConfigurations"]
    assert address["subnet"] == {"id": "Subnet/demo"}
    public = address["publicIPAddressConfiguration"]
    assert (public["deleteOption"], public["sku"]) == ("Delete", {"name": "Standard"})
    assert ND.plan.cost.extras == {
        "disks": pytest.approx(4 * 38.01 / 730),
        "public addresses": pytest.approx(4 * 0.005),
    }


def test_the_sets_api_is_of_before_trusted_launch_became_the_default() -> None:
    """Secure Boot would refuse the HPC image's modules. ``Standard`` cannot be asked for instead: Azure takes it from
    subscriptions with the feature ``UseStandardSecurityType`` only (learn.microsoft.com, "Trusted Launch default")."""
    said = inspect.getsource(sys.modules[compute.VirtualMachineScaleSet.__module__])
    (used,) = set(re.findall(r"Uses Azure REST API version (\d{4}-\d\d-\d\d)", said))
    assert used < "2025-11-01"
    assert "securityProfile" not in ND.one(SCALE_SET)["virtualMachineProfile"]


def test_only_the_users_key_logs_in() -> None:
    login = ND.one(SCALE_SET)["virtualMachineProfile"]["osProfile"]["linuxConfiguration"]
    assert login["disablePasswordAuthentication"] is True
    (key,) = login["ssh"]["publicKeys"]
    assert key["keyData"].startswith("ssh-ed25519 ")


def test_the_image_is_set_once_and_the_number_of_machines_is_sent_as_it_is() -> None:
    """What is ignored is sent as Pulumi's state has it, and the state's number is not the one that there is."""
    assert ND.resource(SCALE_SET).pinned == ("virtualMachineProfile.storageProfile.imageReference",)
    assert _image(ND) == {
        "publisher": "microsoft-dsvm",
        "offer": "ubuntu-hpc",
        "sku": "2404",
        "version": "known when it is created",
    }


def test_machines_start_when_their_way_out_and_their_rights_are_there() -> None:
    assert set(ND.resource(SCALE_SET).after) >= {"Subnet/demo", "RoleAssignment/demo-objects"}


@pytest.mark.parametrize(
    "kind",
    [
        "network:VirtualNetwork",
        "network:NetworkSecurityGroup",
        "network:Subnet",
        "managedidentity:UserAssignedIdentity",
    ],
)
def test_what_is_in_a_resource_group_waits_for_it(kind: str) -> None:
    assert "ResourceGroup/demo" in ND.resource(kind).after


def test_a_role_of_the_resource_group_waits_for_what_is_in_it() -> None:
    assert "VirtualMachineScaleSet/demo" in ND.resource("authorization:RoleDefinition").after


def test_an_image_that_was_named_is_taken() -> None:
    named = Planned(asked("azure", image="microsoft-dsvm:ubuntu-hpc:2204:22.04.2026010101"))
    assert _image(named)["version"] == "22.04.2026010101"
    assert named.resource(SCALE_SET).pinned == ()


def test_an_image_must_have_four_parts() -> None:
    with pytest.raises(BadInput, match="'ubuntu-hpc' is not an Azure image"):
        plan(asked("azure", image="ubuntu-hpc"))


def test_nodes_read_and_write_their_container_and_no_other() -> None:
    grant = ND.one(ASSIGNMENT, "demo-objects")
    assert (grant["scope"], grant["principalId"]) == ("BlobContainer/demo", PRINCIPAL)
    assert grant["roleDefinitionId"].endswith("/ba92f5b4-2d11-453d-a403-e96b0029c9fe")


BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"


@pytest.mark.parametrize(
    ("bucket", "below"),
    [("", "demo/"), ("az://mine/runs/a?account_name=theirs", "runs/a/"), ("az://mine?account_name=theirs", "demo/")],
)
def test_nodes_do_so_below_the_clusters_prefix_only(bucket: str, below: str) -> None:
    """Clusters may share a container. What is read, written or deleted has a path, what is listed has a prefix."""
    grant = Planned(asked("azure", bucket=bucket)).one(ASSIGNMENT, "demo-objects")
    assert grant["conditionVersion"] == "2.0"
    objects, lists = grant["condition"].split(" AND ((!(ActionMatches")
    assert objects == (
        f"((!(ActionMatches{{'{BLOBS}/read'}} AND NOT SubOperationMatches{{'Blob.List'}})"
        + "".join(
            f" AND !(ActionMatches{{'{BLOBS}/{one}'}})" for one in ("write", "add/action", "delete", "move/action")
        )
        + f") OR (@Resource[{BLOBS}:path] StringStartsWith '{below}'))"
    )
    assert lists == (
        f"{{'{BLOBS}/read'}} AND SubOperationMatches{{'Blob.List'}}))"
        f" OR (@Request[{BLOBS}:prefix] StringStartsWith '{below}'))"
    )


def test_a_quote_in_a_prefix_does_not_end_the_condition() -> None:
    assert "StringStartsWith 'it\\'s/'" in only_below("it's")


def test_nodes_take_machines_out_of_their_own_scale_set_and_can_do_nothing_else_to_it() -> None:
    role = ND.one("authorization:RoleDefinition")
    assert role["permissions"] == [
        {
            "actions": [
                "Microsoft.Compute/virtualMachineScaleSets/read",
                "Microsoft.Compute/virtualMachineScaleSets/delete/action",
            ]
        }
    ]
    assert role["assignableScopes"] == [
        "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/gpuctl-demo"
    ]
    grant = ND.one(ASSIGNMENT, "demo-leave")
    assert (grant["scope"], grant["principalId"]) == ("VirtualMachineScaleSet/demo", PRINCIPAL)
    assert grant["roleDefinitionId"] == "RoleDefinition/demo"


def test_every_assignment_is_of_one_container_or_one_scale_set() -> None:
    scopes = [assignment.inputs["scope"] for assignment in ND.all(ASSIGNMENT)]
    assert sorted(scopes) == ["BlobContainer/demo", "BlobContainer/demo", "VirtualMachineScaleSet/demo"]


def test_nodes_have_the_identity_that_was_granted_this() -> None:
    assert ND.one(SCALE_SET)["identity"] == {
        "type": "UserAssigned",
        "userAssignedIdentities": ["UserAssignedIdentity/demo"],
    }


def test_who_makes_the_cluster_reads_its_bucket() -> None:
    grant = ND.one(ASSIGNMENT, "demo-reader")
    assert (grant["principalType"], grant["principalId"]) == ("User", "known when it is created")
    other = Planned(asked("azure", reader="ServicePrincipal:1234")).one(ASSIGNMENT, "demo-reader")
    assert (other["principalType"], other["principalId"]) == ("ServicePrincipal", "1234")


def test_the_bucket_is_private_encrypted_and_by_tls_only() -> None:
    account = ND.one(ACCOUNT)
    assert account["minimumTlsVersion"] == "TLS1_2"
    assert account["enableHttpsTrafficOnly"] is True
    assert account["allowBlobPublicAccess"] is False
    assert account["allowSharedKeyAccess"] is False
    assert account["encryption"] == {"keySource": "Microsoft.Storage", "services": {"blob": {"enabled": True}}}
    assert ND.one("storage:BlobContainer")["publicAccess"] == "None"


def test_the_bucket_stays_in_a_resource_group_that_stays_and_nothing_else_does() -> None:
    kept = {(resource.type.rpartition(":")[2], resource.name) for resource in ND.plan.resources if resource.kept}
    assert kept == {
        ("ResourceGroup", "demo-kept"),
        ("StorageAccount", "demo"),
        ("BlobContainer", "demo"),
        ("RoleAssignment", "demo-reader"),
    }
    for kind in (ACCOUNT, "storage:BlobContainer"):
        assert ND.one(kind)["resourceGroupName"] == KEPT
    assert ND.one("resources:ResourceGroup", "demo-kept")["resourceGroupName"] == KEPT


def test_what_goes_is_in_the_resource_group_that_goes() -> None:
    groups = {resource.inputs.get("resourceGroupName") for resource in ND.plan.resources if not resource.kept}
    assert groups == {"gpuctl-demo", None}


@pytest.mark.parametrize("cluster", ["a", "a-b", "a-cluster-whose-name-is-long-1"])
def test_the_accounts_name_is_one_that_azure_takes(cluster: str) -> None:
    assert re.fullmatch(r"[a-z0-9]{3,24}", asked("azure", cluster=cluster).account_name())


def test_a_bucket_that_is_there_already_is_used_and_none_is_made() -> None:
    given = Planned(asked("azure", bucket="az://mine/runs?account_name=theirs", bucket_group="theirs-too"))
    assert given.all(ACCOUNT) == []
    assert not any(resource.kept for resource in given.plan.resources)
    assert given.one(ASSIGNMENT, "demo-objects")["scope"] == (
        "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/theirs-too"
        "/providers/Microsoft.Storage/storageAccounts/theirs/blobServices/default/containers/mine"
    )


def test_a_bucket_that_an_earlier_cluster_left_is_looked_for_where_that_one_put_it() -> None:
    given = Planned(asked("azure", bucket="az://gpuctl/demo?account_name=gpuctldemo"))
    assert f"/resourceGroups/{KEPT}/" in given.one(ASSIGNMENT, "demo-objects")["scope"]


def test_without_a_subscription_it_is_the_one_of_the_credentials() -> None:
    nameless = Planned(asked("azure", account=""))
    assert "subscriptionId" not in nameless.one("providers:azure-native")
    assert nameless.one(ASSIGNMENT, "demo-objects")["roleDefinitionId"].startswith(
        "/subscriptions/known when it is created/"
    )


def test_pulumi_logs_in_as_the_rest_of_gpuctl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = "providers:azure-native"
    assert Planned(asked("azure")).one(provider)["useDefaultAzureCredential"] == "true"
    monkeypatch.setenv("ARM_CLIENT_ID", "a principal of Pulumi's own")
    (own,) = [one.inputs for one in plan(asked("azure")).resources if one.type.endswith(f":{provider}")]
    assert "useDefaultAzureCredential" not in own


def test_sizes_without_infiniband_are_asked_for_in_the_same_way() -> None:
    assert NC.one(SCALE_SET)["sku"]["name"] == "Standard_NC24ads_A100_v4"
    assert NC.plan.machine.fabric == ""


def _image(planned: Planned) -> Any:
    return planned.one(SCALE_SET)["virtualMachineProfile"]["storageProfile"]["imageReference"]


def test_nodes_are_told_which_identity_is_theirs_by_the_name_that_it_gets() -> None:
    """As far as it is known: a plan is made without a subscription."""
    there = cloud("azure")
    assert there.node_env(replace(asked("azure"), account="")) == {}
    (told,) = there.node_env(replace(asked("azure"), account="sub")).values()
    made = ND.one("managedidentity:UserAssignedIdentity")
    assert told == (
        f"/subscriptions/sub/resourceGroups/{made['resourceGroupName']}/providers/Microsoft.ManagedIdentity/"
        f"userAssignedIdentities/{made['resourceName']}"
    )
