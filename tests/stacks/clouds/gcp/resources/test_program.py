"""What Google Cloud would be asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuctl.stacks.clouds.gcp.ownership import ROLE_ID, by_words
from gpuctl.stacks.clouds.gcp.resources.group import FAMILY
from tests.fakes.gcp.api import matches
from tests.fakes.requests import Planned, asked
from tests.paths import ROOT

A2 = Planned(asked("gcp"))
A3 = Planned(asked("gcp", type="a3-highgpu-8g"))
T4 = Planned(asked("gcp", type="n1-standard-16+t4x2"))
ON_DEMAND = Planned(asked("gcp", spot=False))

TEMPLATE = "compute/instanceTemplate:InstanceTemplate"
GROUP = "compute/instanceGroupManager:InstanceGroupManager"
FIREWALL = "compute/firewall:Firewall"
POLICY = "compute/resourcePolicy:ResourcePolicy"
BUCKET = "storage/bucket:Bucket"
MEMBER = "serviceAccount:email of Account/demo"


def test_spot_machines_are_deleted_when_they_are_taken_and_hear_of_it_as_early_as_may_be() -> None:
    assert A2.one(TEMPLATE)["scheduling"] == {
        "provisioningModel": "SPOT",
        "preemptible": True,
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE",
        "preemptionNoticeDuration": {"seconds": 120},
    }


def test_the_images_driver_is_new_enough_for_the_cuda_that_torch_is_built_for() -> None:
    """torch 2.13's wheels are built for CUDA 13.0, which wants a driver of branch 580 or newer (docs.nvidia.com, "CUDA
    Compatibility"). AWS's and Azure's images have no driver in their names."""
    pins = (ROOT / "constraints.txt").read_text()
    oldest = {"2.13": 580}
    (torch,) = re.findall(r"^torch==(\d+\.\d+)", pins, re.MULTILINE)
    (driver,) = re.findall(r"-with-nvidia-(\d+)$", FAMILY)
    assert int(driver) >= oldest[torch]


def test_on_demand_has_no_spot_at_all() -> None:
    assert ON_DEMAND.one(TEMPLATE)["scheduling"] == {
        "provisioningModel": "STANDARD",
        "automaticRestart": True,
        "onHostMaintenance": "TERMINATE",
    }


def test_the_group_is_in_one_zone_and_empty_and_waits_for_nothing() -> None:
    group = A2.one(GROUP)
    assert (group["zone"], group["targetSize"], group["waitForInstances"]) == ("us-central1-a", 0, False)
    assert group["versions"] == [{"instanceTemplate": "link of InstanceTemplate/demo"}]


def test_a_new_template_does_not_replace_machines_that_work() -> None:
    assert A2.one(GROUP)["updatePolicy"]["type"] == "OPPORTUNISTIC"


def test_a2_is_placed_together_by_its_template() -> None:
    assert A2.one(POLICY)["groupPlacementPolicy"] == {"collocation": "COLLOCATED"}
    assert A2.one(TEMPLATE)["resourcePolicies"] == "link of ResourcePolicy/demo"
    assert "resourcePolicies" not in A2.one(GROUP)


def test_eight_h100_are_placed_together_by_their_group() -> None:
    assert A3.one(POLICY)["workloadPolicy"] == {"type": "HIGH_THROUGHPUT"}
    assert A3.one(GROUP)["resourcePolicies"] == {"workloadPolicy": "link of ResourcePolicy/demo"}
    assert "resourcePolicies" not in A3.one(TEMPLATE)


def test_fewer_h100_are_placed_as_a2_is() -> None:
    assert "groupPlacementPolicy" in Planned(asked("gcp", type="a3-highgpu-4g")).one(POLICY)


def test_l4_are_placed_together_too() -> None:
    planned = Planned(asked("gcp", type="g2-standard-96"))
    assert planned.one(POLICY)["groupPlacementPolicy"] == {"collocation": "COLLOCATED"}
    assert planned.one(TEMPLATE)["resourcePolicies"] == "link of ResourcePolicy/demo"


IDENTIFIED = Planned(asked("gcp", id="0a1b2c3d4e", cluster="a-cluster-of-thirty-characters"))


def test_what_takes_no_labels_tells_whose_it_is() -> None:
    details = "(id 0a1b2c3d4e, owner me_example_com, created 2026-11-21)"
    for kind in ("compute/network:Network", "compute/subnetwork:Subnetwork", GROUP, POLICY, "tags/tagKey:TagKey"):
        said = IDENTIFIED.one(kind)["description"]
        assert said.endswith(f" gpuctl cluster a-cluster-of-thirty-characters {details}")
        told = by_words(said)
        assert told and told[1:] == ("0a1b2c3d4e", "me_example_com", "2026-11-21")
    for rule in IDENTIFIED.all(FIREWALL):
        assert details in rule.inputs["description"]
    account = IDENTIFIED.one("serviceaccount/account:Account")["displayName"]
    role = IDENTIFIED.one("projects/iAMCustomRole:IAMCustomRole")["title"]
    for said in (account, role):
        told = by_words(said)
        assert told and (told.cluster, told.id) == ("a-cluster-of-thirty-characters", "0a1b2c3d4e")
        assert len(said) <= 100, "the most that Google takes of a title"
    assert IDENTIFIED.one(TEMPLATE)["labels"]["gpuctl-id"] == "0a1b2c3d4e"


def test_a_description_never_makes_a_thing_anew() -> None:
    """Google changes none of a network, a subnet, a group or a policy: Pulumi would replace it."""
    for kind in ("compute/network:Network", "compute/subnetwork:Subnetwork", GROUP, POLICY):
        assert "description" in A2.resource(kind).pinned


@pytest.mark.parametrize("planned", [T4, Planned(asked("gcp", placement=False))], ids=["n1", "unwanted"])
def test_machines_are_not_placed_where_nobody_can_or_wants(planned: Planned) -> None:
    assert planned.all(POLICY) == []


def test_fast_families_have_googles_own_network_card() -> None:
    assert A2.one(TEMPLATE)["networkInterfaces"][0]["nicType"] == "GVNIC"
    assert "nicType" not in T4.one(TEMPLATE)["networkInterfaces"][0]


def test_what_hangs_on_a_general_machine_stands_in_the_types_name() -> None:
    template = T4.one(TEMPLATE)
    assert template["machineType"] == "n1-standard-16"
    assert template["guestAccelerators"] == [{"type": "nvidia-tesla-t4", "count": 2}]
    assert "guestAccelerators" not in A2.one(TEMPLATE)


def test_cloud_init_is_sent_as_text() -> None:
    metadata = A2.one(TEMPLATE)["metadata"]
    assert metadata["user-data-encoding"] == "base64"
    assert re.fullmatch(r"[A-Za-z0-9+/]+=*", metadata["user-data"])


def test_the_users_key_logs_in_and_no_other_of_the_project() -> None:
    metadata = A2.one(TEMPLATE)["metadata"]
    assert metadata["ssh-keys"].startswith("ubuntu:ssh-ed25519 ")
    assert metadata["block-project-ssh-keys"] == "true"
    assert "ssh-keys" not in Planned(asked("gcp", ssh_key="")).one(TEMPLATE)["metadata"]


def test_all_traffic_passes_between_the_nodes() -> None:
    rule = A2.one(FIREWALL, "demo-nodes")
    assert rule["allows"] == [{"protocol": "all"}]
    assert rule["sourceTags"] == rule["targetTags"] == A2.one(TEMPLATE)["tags"]


def test_nothing_but_ssh_comes_in_from_outside_and_that_from_the_users_network() -> None:
    (rule,) = [rule.inputs for rule in A2.all(FIREWALL) if "sourceTags" not in rule.inputs]
    assert rule["sourceRanges"] == ["203.0.113.7/32"]
    assert rule["allows"] == [{"protocol": "tcp", "ports": ["22"]}]
    assert rule["targetTags"] == A2.one(TEMPLATE)["tags"]
    assert len(Planned(asked("gcp", ssh_from="")).all(FIREWALL)) == 1


def test_the_plan_shows_what_disks_and_public_addresses_cost() -> None:
    disks = pytest.approx(4 * 200 * 0.17 / 730)
    assert A2.plan.cost.extras == {"disks": disks, "public addresses": pytest.approx(4 * 0.0025)}
    assert ON_DEMAND.plan.cost.extras == {"disks": disks, "public addresses": pytest.approx(4 * 0.005)}


def test_the_image_is_looked_up_once_and_the_number_of_machines_is_set_once() -> None:
    assert A2.resource(TEMPLATE).pinned == ("disks[0].sourceImage",)
    assert A2.resource(GROUP).pinned == ("description", "targetSize")


def test_machines_start_when_their_way_out_and_their_rights_are_there() -> None:
    assert set(A2.resource(GROUP).after) >= {"Firewall/demo-nodes", "BucketIAMMember/demo-objects", "IAMMember/demo"}


def test_an_image_that_was_named_is_taken() -> None:
    template = Planned(asked("gcp", image="projects/p/global/images/mine")).resource(TEMPLATE)
    assert template.inputs["disks"][0]["sourceImage"] == "projects/p/global/images/mine"
    assert template.pinned == ()


def test_the_disk_ends_with_its_machine_and_carries_the_clusters_label() -> None:
    (disk,) = A2.one(TEMPLATE)["disks"]
    assert (disk["autoDelete"], disk["diskSizeGb"], disk["diskType"]) == (True, 200, "pd-ssd")
    one_l4 = Planned(asked("gcp", type="g2-standard-8"))
    assert one_l4.one(TEMPLATE)["disks"][0]["diskType"] == "pd-balanced"
    assert one_l4.plan.cost.extras["disks"] == pytest.approx(4 * 200 * 0.10 / 730)
    assert disk["labels"]["gpuctl-cluster"] == "demo"


def test_labels_are_the_tags_in_googles_stricter_form() -> None:
    labels = A2.one(BUCKET)["labels"]
    assert labels == {
        "gpuctl-cluster": "demo",
        "gpuctl-version": "0_1_0",
        "gpuctl-owner": "me_example_com",
        "gpuctl-created": "2026-11-21",
    }


def test_nodes_read_and_write_their_prefix_and_list_their_bucket() -> None:
    objects, listing = (grant.inputs for grant in sorted(_grants("storage/bucketIAMMember"), key=_condition_last))
    bucket = A2.one(BUCKET)["name"]
    assert (objects["role"], objects["bucket"]) == ("roles/storage.objectUser", bucket)
    assert objects["condition"]["expression"] == (
        f'resource.name.startsWith("projects/_/buckets/{bucket}/objects/demo/")'
    )
    assert (listing["role"], listing["bucket"]) == ("roles/storage.legacyBucketReader", bucket)


def test_nodes_leave_their_own_group_and_no_other_by_its_tag() -> None:
    (grant,) = _grants("projects/iAMMember")
    assert grant.inputs["condition"]["expression"] == 'resource.matchTagId("TagKey/demo", "TagValue/demo")'
    assert A2.one(GROUP)["params"] == {"resourceManagerTags": {"TagKey/demo": "TagValue/demo"}}


def test_the_role_to_leave_names_its_permissions() -> None:
    role = A2.one("projects/iAMCustomRole:IAMCustomRole")
    assert role["permissions"] == ["compute.instanceGroupManagers.get", "compute.instanceGroupManagers.update"]


def test_every_grant_names_a_resource_or_a_tag_and_goes_to_the_nodes_own_account() -> None:
    grants = [resource.inputs for resource in A2.plan.resources if "IAMMember" in resource.type]
    assert len(grants) == 3
    for grant in grants:
        assert grant["member"] == MEMBER
        assert "bucket" in grant or "matchTagId" in grant["condition"]["expression"]
    assert A2.one(TEMPLATE)["serviceAccount"]["email"] == "email of Account/demo"


def test_the_bucket_is_private_and_forgets_unfinished_uploads_and_what_was_deleted() -> None:
    bucket = A2.one(BUCKET)
    assert bucket["uniformBucketLevelAccess"] is True
    assert bucket["publicAccessPrevention"] == "enforced"
    assert bucket["softDeletePolicy"] == {"retentionDurationSeconds": 0}
    assert bucket["lifecycleRules"] == [{"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 3}}]


def test_the_bucket_stays_and_nothing_else() -> None:
    assert [resource.type for resource in A2.plan.resources if resource.kept] == ["gcp:storage/bucket:Bucket"]


def test_a_bucket_that_is_there_already_is_used_and_none_is_made() -> None:
    given = Planned(asked("gcp", bucket="gs://mine/runs/demo"))
    assert given.all(BUCKET) == []
    grant = given.one("storage/bucketIAMMember:BucketIAMMember", "demo-objects")
    assert grant["bucket"] == "mine"
    assert "buckets/mine/objects/runs/demo/" in grant["condition"]["expression"]


def test_a_long_name_makes_a_short_account() -> None:
    long = Planned(asked("gcp", cluster="a-cluster-whose-name-is-long-1"))
    account = long.one("serviceaccount/account:Account")["accountId"]
    assert re.fullmatch(r"gpuctl-[a-z0-9-]{0,23}", account)
    other = Planned(asked("gcp", cluster="a-cluster-whose-name-is-long-2"))
    assert other.one("serviceaccount/account:Account")["accountId"] != account


def test_a_role_does_not_have_the_id_of_one_that_was_deleted_a_month_ago() -> None:
    """Google keeps that for 37 days, and gives such a role back in the first seven alone."""
    days = [Planned(asked("gcp", created=day)) for day in ("2026-11-21", "2026-12-01")]
    ids = [one.one("projects/iAMCustomRole:IAMCustomRole")["roleId"] for one in days]
    assert ids == ["gpuctl_demo_2026_11_21", "gpuctl_demo_2026_12_01"]
    assert [matches(ROLE_ID, f"projects/p/roles/{id_}") for id_ in ids] == ["demo", "demo"]


def test_without_a_project_it_is_the_one_of_the_credentials() -> None:
    nameless = Planned(asked("gcp", account=""))
    assert "project" not in nameless.one("providers:gcp")
    assert nameless.one("projects/iAMMember:IAMMember")["project"] == "known when it is created"


def _grants(kind: str) -> list[Any]:
    return [resource for resource in A2.plan.resources if f":{kind}:" in resource.type]


def _condition_last(grant: Any) -> bool:
    return "condition" not in grant.inputs
