"""What AWS would be asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuctl.stacks.plan.planner import plan
from tests.fakes.requests import Planned, asked

SEVERAL_CARDS = Planned(asked("aws"))
ONE_CARD = Planned(asked("aws", type="g5.48xlarge"))
NO_FABRIC = Planned(asked("aws", type="g5.xlarge"))

TEMPLATE = "ec2/launchTemplate:LaunchTemplate"
GROUP = "autoscaling/group:Group"

DISKS = pytest.approx(4 * (200 * 0.08 + 375 * 0.04) / 730)


def test_a_p4d_has_four_cards_and_the_first_alone_is_device_0() -> None:
    cards = SEVERAL_CARDS.one(TEMPLATE)["networkInterfaces"]
    assert [card["networkCardIndex"] for card in cards] == [0, 1, 2, 3]
    assert [card["deviceIndex"] for card in cards] == [0, 1, 1, 1]
    assert [card["interfaceType"] for card in cards] == ["efa", "efa-only", "efa-only", "efa-only"]


def test_the_disk_of_a_machine_with_several_gpus_is_a_fast_one_and_the_plan_has_its_price() -> None:
    """A usual one reads 125 MB/s: slower than the bucket."""
    (disk,) = SEVERAL_CARDS.one(TEMPLATE)["blockDeviceMappings"]
    assert (disk["ebs"]["volumeType"], disk["ebs"]["throughput"]) == ("gp3", 500)
    (usual,) = NO_FABRIC.one(TEMPLATE)["blockDeviceMappings"]
    assert "throughput" not in usual["ebs"]
    assert NO_FABRIC.plan.cost.extras["disks"] == pytest.approx(4 * 200 * 0.08 / 730)
    (of_one_h100,) = Planned(asked("aws", type="p5.4xlarge")).one(TEMPLATE)["blockDeviceMappings"]
    assert of_one_h100["ebs"]["throughput"] == 500


def test_each_card_is_in_the_nodes_security_group_and_ends_with_its_machine() -> None:
    for card in SEVERAL_CARDS.one(TEMPLATE)["networkInterfaces"]:
        assert card["securityGroups"] == ["SecurityGroup/demo-nodes"]
        assert card["deleteOnTermination"] == "true"


def test_a_p5_has_an_interface_for_each_of_its_32_cards() -> None:
    cards = Planned(asked("aws", type="p5.48xlarge")).one(TEMPLATE)["networkInterfaces"]
    assert [card["networkCardIndex"] for card in cards] == list(range(32))


@pytest.mark.parametrize("name", ["p5en.48xlarge", "p6-b200.48xlarge"])
def test_cards_of_the_newest_machines_have_device_0_alone(name: str) -> None:
    cards = Planned(asked("aws", type=name)).one(TEMPLATE)["networkInterfaces"]
    assert {card["deviceIndex"] for card in cards} == {0}


def test_a_type_without_efa_has_one_usual_interface() -> None:
    (card,) = NO_FABRIC.one(TEMPLATE)["networkInterfaces"]
    assert "interfaceType" not in card


def test_machines_with_several_cards_get_no_public_address_and_those_with_one_do() -> None:
    for card in SEVERAL_CARDS.one(TEMPLATE)["networkInterfaces"]:
        assert "associatePublicIpAddress" not in card
    assert SEVERAL_CARDS.one("ec2/subnet:Subnet", "demo-us-east-1a")["mapPublicIpOnLaunch"] is False
    (card,) = ONE_CARD.one(TEMPLATE)["networkInterfaces"]
    assert card["associatePublicIpAddress"] == "true"


def test_without_public_addresses_the_internet_is_behind_a_gateway_whose_price_the_plan_shows() -> None:
    routes = SEVERAL_CARDS.one("ec2/routeTable:RouteTable", "demo-private")["routes"]
    assert routes == [{"cidrBlock": "0.0.0.0/0", "natGatewayId": "NatGateway/demo-nat"}]
    nodes = SEVERAL_CARDS.one("ec2/routeTableAssociation:RouteTableAssociation", "demo-us-east-1a")
    assert nodes["routeTableId"] == "RouteTable/demo-private"
    assert SEVERAL_CARDS.plan.cost.extras == {
        "disks": DISKS,
        "NAT gateway, and $0.045 for each GB through it": pytest.approx(0.045),
        "public address of the NAT gateway": pytest.approx(0.005),
    }
    assert ONE_CARD.all("ec2/natGateway:NatGateway") == []
    assert ONE_CARD.plan.cost.extras == {"disks": DISKS, "public addresses": pytest.approx(4 * 0.005)}


def test_the_bucket_is_reached_past_the_gateway() -> None:
    endpoint = SEVERAL_CARDS.one("ec2/vpcEndpoint:VpcEndpoint")
    assert endpoint["vpcEndpointType"] == "Gateway"
    assert endpoint["serviceName"] == "com.amazonaws.us-east-1.s3"
    assert endpoint["routeTableIds"] == ["RouteTable/demo-private"]


@pytest.mark.parametrize("direction", ["Ingress", "Egress"])
def test_all_traffic_passes_between_the_nodes_in_and_out(direction: str) -> None:
    rules = [
        rule.inputs for rule in SEVERAL_CARDS.all(f"vpc/securityGroup{direction}Rule:SecurityGroup{direction}Rule")
    ]
    to_itself = [rule for rule in rules if rule.get("referencedSecurityGroupId") == rule["securityGroupId"]]
    assert [rule["ipProtocol"] for rule in to_itself] == ["-1"]
    assert to_itself[0]["securityGroupId"] == "SecurityGroup/demo-nodes"


@pytest.mark.parametrize("planned", [SEVERAL_CARDS, ONE_CARD], ids=["several cards", "one card"])
def test_nothing_but_ssh_comes_in_from_outside_and_that_from_the_users_network(planned: Planned) -> None:
    rules = [rule.inputs for rule in planned.all("vpc/securityGroupIngressRule:SecurityGroupIngressRule")]
    outside = [rule for rule in rules if "referencedSecurityGroupId" not in rule]
    assert [(r["cidrIpv4"], r["fromPort"], r["toPort"]) for r in outside] == [("203.0.113.7/32", 22, 22)]


def test_ssh_reaches_machines_without_public_addresses_and_comes_from_the_users_own() -> None:
    endpoint = SEVERAL_CARDS.one("ec2transitgateway/instanceConnectEndpoint:InstanceConnectEndpoint")
    assert endpoint["preserveClientIp"] is True
    assert endpoint["subnetId"] == "Subnet/demo-us-east-1a"
    assert ONE_CARD.all("ec2transitgateway/instanceConnectEndpoint:InstanceConnectEndpoint") == []


def test_without_a_network_to_come_from_nobody_may_enter() -> None:
    closed = Planned(asked("aws", ssh_from=""))
    rules = [rule.inputs for rule in closed.all("vpc/securityGroupIngressRule:SecurityGroupIngressRule")]
    assert all(rule["referencedSecurityGroupId"] == rule["securityGroupId"] for rule in rules)
    assert closed.all("ec2transitgateway/instanceConnectEndpoint:InstanceConnectEndpoint") == []


def test_spot_is_asked_for_in_the_groups_policy_and_not_in_the_template() -> None:
    group = SEVERAL_CARDS.one(GROUP)
    assert group["mixedInstancesPolicy"]["instancesDistribution"] == {
        "onDemandBaseCapacity": 0,
        "onDemandPercentageAboveBaseCapacity": 0,
        "spotAllocationStrategy": "price-capacity-optimized",
    }
    template = group["mixedInstancesPolicy"]["launchTemplate"]["launchTemplateSpecification"]
    assert template == {"launchTemplateId": "LaunchTemplate/demo", "version": "1"}
    assert "instanceMarketOptions" not in SEVERAL_CARDS.one(TEMPLATE)


def test_on_demand_has_no_spot_at_all() -> None:
    group = Planned(asked("aws", spot=False)).one(GROUP)
    assert group["mixedInstancesPolicy"]["instancesDistribution"] == {
        "onDemandBaseCapacity": 0,
        "onDemandPercentageAboveBaseCapacity": 100,
    }


def test_the_group_has_as_many_machines_as_asked_for_in_one_subnet_and_side_by_side() -> None:
    group = SEVERAL_CARDS.one(GROUP)
    assert (group["minSize"], group["desiredCapacity"], group["maxSize"]) == (0, 0, 4)
    assert group["vpcZoneIdentifiers"] == ["Subnet/demo-us-east-1a"]
    assert group["placementGroup"] == "demo"
    assert SEVERAL_CARDS.one("ec2/placementGroup:PlacementGroup")["strategy"] == "cluster"


def test_the_group_starts_no_machine_beyond_its_number_and_ends_none_that_works() -> None:
    group = SEVERAL_CARDS.one(GROUP)
    assert group["capacityRebalance"] is False
    assert group["suspendedProcesses"] == ["AZRebalance"]
    assert group["waitForCapacityTimeout"] == "0"


@pytest.mark.parametrize("planned", [NO_FABRIC, Planned(asked("aws", placement=False))], ids=["no fabric", "unwanted"])
def test_machines_are_not_placed_without_fabric_or_when_that_is_unwanted(planned: Planned) -> None:
    assert planned.all("ec2/placementGroup:PlacementGroup") == []
    assert "placementGroup" not in planned.one(GROUP)


def test_the_metadata_service_asks_for_a_token() -> None:
    options = SEVERAL_CARDS.one(TEMPLATE)["metadataOptions"]
    assert (options["httpTokens"], options["httpPutResponseHopLimit"]) == ("required", 2)


def test_the_disk_is_encrypted_and_ends_with_its_machine() -> None:
    (disk,) = SEVERAL_CARDS.one(TEMPLATE)["blockDeviceMappings"]
    assert disk["ebs"]["encrypted"] == disk["ebs"]["deleteOnTermination"] == "true"
    assert disk["ebs"]["volumeSize"] == 200


def test_what_a_machine_leaves_behind_would_carry_the_clusters_tag() -> None:
    specifications = SEVERAL_CARDS.one(TEMPLATE)["tagSpecifications"]
    assert {one["resourceType"]: one["tags"]["gpuctl:cluster"] for one in specifications} == {
        "instance": "demo",
        "volume": "demo",
        "network-interface": "demo",
    }


def test_the_users_key_logs_in() -> None:
    assert SEVERAL_CARDS.one("ec2/keyPair:KeyPair")["publicKey"].startswith("ssh-ed25519 ")
    keyless = Planned(asked("aws", ssh_key=""))
    assert keyless.all("ec2/keyPair:KeyPair") == []
    assert "keyName" not in keyless.one(TEMPLATE)


def test_the_image_is_looked_up_once_and_the_number_of_machines_is_set_once() -> None:
    assert SEVERAL_CARDS.resource(TEMPLATE).pinned == ("imageId",)
    assert SEVERAL_CARDS.resource(GROUP).pinned == ("desiredCapacity",)


def test_machines_start_when_their_way_out_and_their_rights_are_there() -> None:
    assert set(SEVERAL_CARDS.resource(GROUP).after) >= {
        "NatGateway/demo-nat",
        "RouteTableAssociation/demo-us-east-1a",
        "RolePolicy/demo",
        "VpcEndpoint/demo-s3",
    }


def test_the_nat_gateway_ends_before_what_it_stands_on() -> None:
    assert "InternetGateway/demo" in SEVERAL_CARDS.resource("ec2/natGateway:NatGateway").after


def test_a_buckets_access_is_changed_by_one_after_the_other() -> None:
    policy = SEVERAL_CARDS.resource("s3/bucketPolicy:BucketPolicy")
    assert "BucketPublicAccessBlock/demo" in policy.after


def test_an_image_that_was_named_is_taken() -> None:
    template = Planned(asked("aws", image="ami-0123")).resource(TEMPLATE)
    assert (template.inputs["imageId"], template.pinned) == ("ami-0123", ())


def test_the_root_disk_has_the_name_that_its_image_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Amazon Linux has /dev/xvda: a second disk would come besides."""

    def told(_: object, args: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        assert args.token == "aws:ec2/getAmi:getAmi"
        return {**args.args, "id": "ami-0123", "rootDeviceName": "/dev/xvda"}, []

    monkeypatch.setattr("gpuctl.stacks.plan.planner._Mocks.call", told)  # what AWS answers
    (template,) = [one for one in plan(asked("aws", image="ami-0123")).resources if one.type.endswith(TEMPLATE)]
    assert template.inputs["blockDeviceMappings"][0]["deviceName"] == "/dev/xvda"
    monkeypatch.undo()
    (usual,) = Planned(asked("aws", image="ami-0123")).one(TEMPLATE)["blockDeviceMappings"]
    assert usual["deviceName"] == "/dev/sda1"


@pytest.mark.parametrize(
    ("region", "named"), [("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov"), ("eu-west-1", "aws")]
)
def test_arns_are_of_the_regions_partition(region: str, named: str) -> None:
    there = Planned(asked("aws", region=region, zones=(f"{region}a",), bucket=f"s3://mine/demo?region={region}"))
    arns = [one["Resource"] for one in _statements(there.one("iam/rolePolicy:RolePolicy")["policy"])]
    assert {arn.split(":")[1] for arn in arns} == {named}


def test_the_bucket_and_what_guards_it_stay_and_nothing_else() -> None:
    for resource in SEVERAL_CARDS.plan.resources:
        assert resource.kept == resource.type.startswith("aws:s3/")


def test_nodes_read_and_write_their_prefix_list_it_and_leave_their_group_and_no_more() -> None:
    objects, listing, leaving = _statements(SEVERAL_CARDS.one("iam/rolePolicy:RolePolicy")["policy"])
    bucket = "arn of Bucket/demo"
    assert objects["Resource"] == f"{bucket}/demo/*"
    assert not [action for action in objects["Action"] if "*" in action]
    assert listing["Resource"] == bucket
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["demo", "demo/*"]}}
    assert leaving["Action"] == "autoscaling:TerminateInstanceInAutoScalingGroup"
    assert leaving["Condition"] == {"StringEquals": {"autoscaling:ResourceTag/gpuctl:cluster": "demo"}}


def test_nodes_leave_the_group_of_their_own_cluster_by_its_identity() -> None:
    """Two clusters may have one name."""
    own = Planned(asked("aws", id="0123456789"))
    leaving = _statements(own.one("iam/rolePolicy:RolePolicy")["policy"])[2]
    assert leaving["Condition"] == {"StringEquals": {"autoscaling:ResourceTag/gpuctl:id": "0123456789"}}
    assert {"key": "gpuctl:id", "value": "0123456789", "propagateAtLaunch": True} in own.one(GROUP)["tags"]


def test_every_statement_that_allows_names_a_resource_or_a_tag() -> None:
    for statement in _statements(SEVERAL_CARDS.one("iam/rolePolicy:RolePolicy")["policy"]):
        named = statement["Resource"].startswith("arn of Bucket/demo")
        assert named or "gpuctl:cluster" in json.dumps(statement["Condition"])


def test_the_bucket_is_private_encrypted_by_tls_only_and_forgets_unfinished_uploads() -> None:
    shut = SEVERAL_CARDS.one("s3/bucketPublicAccessBlock:BucketPublicAccessBlock")
    assert [value for key, value in shut.items() if key != "bucket"] == [True] * 4
    (deny,) = _statements(SEVERAL_CARDS.one("s3/bucketPolicy:BucketPolicy")["policy"])
    assert (deny["Effect"], deny["Principal"], deny["Action"]) == ("Deny", "*", "s3:*")
    assert deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert deny["Resource"] == ["arn of Bucket/demo", "arn of Bucket/demo/*"]
    (encryption,) = SEVERAL_CARDS.one(
        "s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration"
    )["rules"]
    assert encryption["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}
    (rule,) = SEVERAL_CARDS.one("s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration")["rules"]
    assert rule["status"] == "Enabled"
    assert rule["abortIncompleteMultipartUpload"] == {"daysAfterInitiation": 3}


def test_a_bucket_that_is_there_already_is_used_and_none_is_made() -> None:
    given = Planned(asked("aws", bucket="s3://mine/runs/demo?region=eu-west-1"))
    assert [r.type for r in given.plan.resources if ":s3/" in r.type] == []
    objects, listing, _, key = _statements(given.one("iam/rolePolicy:RolePolicy")["policy"])
    assert (objects["Resource"], listing["Resource"]) == ("arn:aws:s3:::mine/runs/demo/*", "arn:aws:s3:::mine")
    assert key["Resource"] == "arn:aws:kms:eu-west-1:123456789012:key/*"
    assert key["Condition"] == {
        "StringEquals": {"kms:ViaService": "s3.eu-west-1.amazonaws.com"},
        "StringLike": {"kms:EncryptionContext:aws:s3:arn": ["arn:aws:s3:::mine", "arn:aws:s3:::mine/runs/demo/*"]},
    }


def test_the_bucket_that_an_earlier_up_has_left_is_made_private_again() -> None:
    """That one may have broken off before it was."""
    own = asked("aws").bucket_url()
    again = Planned(asked("aws", bucket=own))
    kinds = sorted(r.type.rpartition(":")[2] for r in again.plan.resources if ":s3/" in r.type)
    assert kinds == [
        "BucketLifecycleConfiguration",
        "BucketPolicy",
        "BucketPublicAccessBlock",
        "BucketServerSideEncryptionConfiguration",
    ]
    policy = again.one("s3/bucketPolicy:BucketPolicy")
    name = own.removeprefix("s3://").partition("/")[0]
    (deny,) = _statements(policy["policy"])
    assert (policy["bucket"], deny["Resource"]) == (name, [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"])


def test_no_other_region_and_no_other_account_is_touched() -> None:
    provider = SEVERAL_CARDS.one("providers:aws")
    assert provider["region"] == "us-east-1"
    assert json.loads(provider["allowedAccountIds"]) == ["123456789012"]


def _statements(policy: str) -> list[dict[str, Any]]:
    statements: list[dict[str, Any]] = json.loads(policy)["Statement"]
    return statements
