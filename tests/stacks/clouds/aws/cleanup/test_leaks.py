"""``leaks`` on AWS: a mess made by hand on a moto server is found to the last piece, and nothing of a stranger's.

What moto 5.2 cannot do is answered here as AWS does (``recorded``): it knows no placement groups and no instance
connect endpoints, forgets that an instance is spot, and believes any credentials.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import boto3
import pytest

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import CredentialsRefused, Leftover
from gpuctl.stacks.clouds.aws.cleanup.leaks import KINDS, OURS, scan
from tests.fakes.aws.recorded import Answers, answering, query_refusal, refusal
from tests.fakes.requests import Planned, asked, planned

pytestmark = pytest.mark.usefixtures("aws_account")

HOME, AWAY = "us-east-1", "eu-west-1"
REMOVES = (
    "gpuctl down --cluster NAME; if it was made elsewhere: gpuctl down --by-tag NAME --provider aws --region REGION"
)
TYPE = "p4d.24xlarge"


def _set(name: str, items: str) -> str:
    return f'<R xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><{name}>{items}</{name}></R>'


def _tagged(cluster: str) -> str:
    return f"<tagSet><item><key>gpuctl:cluster</key><value>{cluster}</value></item></tagSet>"


NOTHING: Answers = {
    ("ec2", "DescribePlacementGroups"): _set("placementGroupSet", ""),
    ("ec2", "DescribeInstanceConnectEndpoints"): _set("instanceConnectEndpointSet", ""),
}


@pytest.fixture
def cluster() -> str:
    return f"c{uuid.uuid4().hex[:8]}"


def tags(cluster: str) -> list[dict[str, str]]:
    return [{"Key": "gpuctl:cluster", "Value": cluster}, {"Key": "Name", "Value": cluster}]


class Mess:
    """One of each kind with ``tags``. ``made``: what they are, by kind."""

    def __init__(self, tags: Sequence[dict[str, str]], name: str, region: str = HOME) -> None:
        self.ec2 = boto3.client("ec2", region_name=region)
        self._tags = list(tags)
        self._region = region
        self.made: dict[str, str] = {}
        self._network(name)
        self._machines(name)
        self._identity(name)

    def _with(self, kind: str) -> Any:
        return [{"ResourceType": kind, "Tags": self._tags}]

    def _network(self, name: str) -> None:
        made, ec2 = self.made, self.ec2
        made["VPC"] = ec2.create_vpc(CidrBlock="10.77.0.0/16", TagSpecifications=self._with("vpc"))["Vpc"]["VpcId"]
        vpc = {"VpcId": made["VPC"]}
        made["subnet"] = ec2.create_subnet(**vpc, CidrBlock="10.77.0.0/20", TagSpecifications=self._with("subnet"))[
            "Subnet"
        ]["SubnetId"]
        made["internet gateway"] = ec2.create_internet_gateway(TagSpecifications=self._with("internet-gateway"))[
            "InternetGateway"
        ]["InternetGatewayId"]
        ec2.attach_internet_gateway(**vpc, InternetGatewayId=made["internet gateway"])
        made["route table"] = ec2.create_route_table(**vpc, TagSpecifications=self._with("route-table"))["RouteTable"][
            "RouteTableId"
        ]
        made["security group"] = ec2.create_security_group(
            **vpc, GroupName=name, Description="nodes", TagSpecifications=self._with("security-group")
        )["GroupId"]
        made["elastic IP"] = ec2.allocate_address(Domain="vpc", TagSpecifications=self._with("elastic-ip"))[
            "AllocationId"
        ]
        made["NAT gateway"] = ec2.create_nat_gateway(
            SubnetId=made["subnet"],
            AllocationId=made["elastic IP"],
            TagSpecifications=self._with("natgateway"),
        )["NatGateway"]["NatGatewayId"]
        made["VPC endpoint"] = ec2.create_vpc_endpoint(
            **vpc,
            ServiceName=f"com.amazonaws.{self._region}.s3",
            VpcEndpointType="Gateway",
            TagSpecifications=self._with("vpc-endpoint"),
        )["VpcEndpoint"]["VpcEndpointId"]
        made["network interface"] = ec2.create_network_interface(
            SubnetId=made["subnet"], TagSpecifications=self._with("network-interface")
        )["NetworkInterface"]["NetworkInterfaceId"]

    def _machines(self, name: str) -> None:
        made, ec2 = self.made, self.ec2
        image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
        made["instance"] = ec2.run_instances(
            ImageId=image,
            InstanceType=TYPE,
            MinCount=1,
            MaxCount=1,
            SubnetId=made["subnet"],
            TagSpecifications=self._with("instance"),
        )["Instances"][0]["InstanceId"]
        made["volume"] = ec2.create_volume(
            AvailabilityZone=f"{self._region}a", Size=200, VolumeType="gp3", TagSpecifications=self._with("volume")
        )["VolumeId"]
        made["key pair"] = ec2.create_key_pair(KeyName=name, TagSpecifications=self._with("key-pair"))["KeyPairId"]
        made["launch template"] = ec2.create_launch_template(
            LaunchTemplateName=name,
            LaunchTemplateData={"ImageId": image, "InstanceType": TYPE},
            TagSpecifications=self._with("launch-template"),
        )["LaunchTemplate"]["LaunchTemplateId"]
        made["auto scaling group"] = name
        boto3.client("autoscaling", region_name=self._region).create_auto_scaling_group(
            AutoScalingGroupName=name,
            MinSize=0,
            MaxSize=4,
            DesiredCapacity=0,
            VPCZoneIdentifier=made["subnet"],
            LaunchTemplate={"LaunchTemplateId": made["launch template"]},
            Tags=[{**tag, "PropagateAtLaunch": True} for tag in self._tags],
        )

    def _identity(self, name: str) -> None:
        iam = boto3.client("iam", region_name=HOME)
        named = f"gpuctl-{name}-{self._region}"
        iam.create_role(RoleName=named, AssumeRolePolicyDocument="{}", Tags=self._tags)
        iam.create_instance_profile(InstanceProfileName=named, Tags=self._tags)
        self.made |= {"role": named, "instance profile": named}

    def iam_role_is_there(self) -> bool:
        found = boto3.client("iam", region_name=HOME).get_role(RoleName=self.made["role"])
        return bool(found["Role"])


def pieces(found: Sequence[Leftover]) -> set[tuple[str, str]]:
    return {(one.kind, one.id) for one in found}


@pytest.mark.slow
def test_every_piece_of_a_mess_is_found_and_nothing_of_a_strangers(cluster: str) -> None:
    mess = Mess(tags(cluster), f"{cluster}-ours")
    stranger = Mess([{"Key": "Name", "Value": cluster}], f"{cluster}-theirs")
    neighbour = Mess(tags(f"{cluster}2"), f"{cluster}-next")
    seen = scan([], cluster, answering(NOTHING))
    assert (seen.regions, seen.unseen) == ((HOME,), ())
    assert pieces(seen.found) == set(mess.made.items())
    everywhere = pieces(scan([], None, answering(NOTHING)).found)
    assert everywhere >= set(mess.made.items()) | set(neighbour.made.items())
    assert not everywhere & set(stranger.made.items())


@pytest.mark.slow
def test_all_that_the_program_makes_is_looked_for() -> None:
    """What has tags and is deleted on ``down``; rules go with their security group."""
    words = {"Eip": "elastic IP", "Group": "auto scaling group"}
    made = {
        resource.type.rpartition(":")[2]
        for resource in planned(asked("aws")).resources
        if "tags" in resource.inputs and not resource.kept and not resource.type.endswith("Rule")
    }
    looked_for = {kind.what.lower() for kind in KINDS} | {"role", "instance profile"}
    kinds = {words.get(name) or re.sub(r"\B(?=[A-Z])", " ", name) for name in made}
    assert "Nat Gateway" in kinds
    assert {kind for kind in kinds if kind.lower() not in looked_for} == set()


@pytest.mark.slow
def test_roles_and_profiles_have_the_names_that_are_looked_through() -> None:
    of = Planned(asked("aws"))
    prefixes = [of.one(kind)["namePrefix"] for kind in ("iam/role:Role", "iam/instanceProfile:InstanceProfile")]
    assert [prefix.startswith(OURS) for prefix in prefixes] == [True, True]


@pytest.mark.slow
def test_what_costs_something_is_told_its_price_and_comes_first(cluster: str) -> None:
    Mess(tags(cluster), cluster)
    found = scan([], cluster, answering(NOTHING)).found
    usd = [(one.kind, round(one.usd_per_hour, 5)) for one in found if one.usd_per_hour]
    assert usd == [
        ("instance", 21.95764),
        ("NAT gateway", 0.045),
        ("volume", round(200 * 0.08 / 730, 5)),
        ("elastic IP", 0.005),
    ]
    assert {one.about for one in found if one.kind == "instance"} == {f"{TYPE}, running"}


@pytest.mark.slow
def test_what_has_been_deleted_is_not_there_though_aws_still_shows_it(cluster: str) -> None:
    mess = Mess(tags(cluster), cluster)
    mess.ec2.terminate_instances(InstanceIds=[mess.made["instance"]])
    mess.ec2.delete_nat_gateway(NatGatewayId=mess.made["NAT gateway"])
    kinds = {one.kind for one in scan([], cluster, answering(NOTHING)).found}
    assert "volume" in kinds
    assert not kinds & {"instance", "NAT gateway"}


@pytest.mark.slow
def test_the_regions_that_are_named_are_looked_into_and_all_of_them_if_that_is_asked(cluster: str) -> None:
    home, away = Mess(tags(cluster), cluster), Mess(tags(cluster), cluster, AWAY)
    regional = {(kind, one) for kind, one in away.made.items() if kind not in ("role", "instance profile")}
    assert not pieces(scan([HOME], cluster, answering(NOTHING)).found) & {("VPC", away.made["VPC"])}
    both = scan([HOME, AWAY], cluster, answering(NOTHING)).found
    assert pieces(both) == set(home.made.items()) | set(away.made.items())
    assert {(one.kind, one.id) for one in both if one.region == AWAY} == regional
    listed = "<R><regionInfo><item><regionName>eu-west-1</regionName></item></regionInfo></R>"
    everywhere = scan(["all"], cluster, answering({**NOTHING, ("ec2", "DescribeRegions"): listed}))
    assert everywhere.regions == (AWAY,)
    assert {(one.kind, one.id) for one in everywhere.found if one.region} == regional


def test_placement_groups_and_endpoints_are_read_from_what_aws_answers(cluster: str) -> None:
    def group(name: str, owner: str, state: str) -> str:
        return f"<item><groupName>{name}</groupName><state>{state}</state>{_tagged(owner)}</item>"

    def endpoint(name: str, owner: str, state: str) -> str:
        name = f"<instanceConnectEndpointId>{name}</instanceConnectEndpointId>"
        return f"<item>{name}<state>{state}</state>{_tagged(owner)}</item>"

    groups = group("ours", cluster, "available") + group("gone", cluster, "deleted") + group("x", "other", "available")
    endpoints = endpoint("eice-1", cluster, "create-complete") + endpoint("eice-2", cluster, "delete-complete")
    answers: Answers = {
        ("ec2", "DescribePlacementGroups"): _set("placementGroupSet", groups),
        ("ec2", "DescribeInstanceConnectEndpoints"): _set("instanceConnectEndpointSet", endpoints),
    }
    requests: list[bytes] = []
    found = scan([], cluster, answering(answers, requests)).found
    assert pieces(found) == {("placement group", "ours"), ("instance connect endpoint", "eice-1")}
    assert len(requests) == 2
    assert all(f"Filter.1.Value.1={cluster}".encode() in request for request in requests)


def test_a_spot_instance_of_no_known_price_is_told_as_one_that_costs_something(cluster: str) -> None:
    instance = (
        "<item><instancesSet><item><instanceId>i-1</instanceId><instanceType>p9.huge</instanceType>"
        "<instanceState><code>16</code><name>running</name></instanceState>"
        f"<instanceLifecycle>spot</instanceLifecycle>{_tagged(cluster)}</item></instancesSet></item>"
    )
    answers: Answers = {**NOTHING, ("ec2", "DescribeInstances"): _set("reservationSet", instance)}
    (found,) = scan([], cluster, answering(answers)).found
    assert (found.about, found.usd_per_hour) == ("p9.huge, running, spot", None)


@pytest.mark.slow
def test_what_may_not_be_looked_at_is_said_and_all_else_is_found(cluster: str) -> None:
    mess = Mess(tags(cluster), cluster)
    seen = scan([], cluster, answering({**NOTHING, ("ec2", "DescribeVolumes"): refusal("UnauthorizedOperation")}))
    assert seen.unseen == (f"volumes in {HOME}: these AWS credentials may not call DescribeVolumes",)
    assert pieces(seen.found) == {piece for piece in mess.made.items() if piece[0] != "volume"}


@pytest.mark.slow
def test_a_role_that_goes_while_it_is_looked_at_is_gone(cluster: str) -> None:
    mess = Mess(tags(cluster), cluster)
    gone = {**NOTHING, ("iam", "GetRole"): refusal("NoSuchEntity")}
    seen = scan([], cluster, answering(gone))
    assert seen.unseen == ()
    assert pieces(seen.found) == {piece for piece in mess.made.items() if piece[0] != "role"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ExpiredToken", "the AWS credentials have expired; log in"),
        ("InvalidClientTokenId", "AWS rejects these credentials here (InvalidClientTokenId); log in"),
    ],
)
def test_credentials_that_aws_refuses_are_one_line(code: str, said: str) -> None:
    with pytest.raises(CredentialsRefused) as refused:
        scan([], None, answering({("sts", "GetCallerIdentity"): query_refusal(code)}))
    assert str(refused.value).startswith(said)


def test_without_credentials_a_region_or_a_profile_that_is_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(CredentialsRefused, match="no AWS credentials found; log in"):
        scan([])
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(BadInput, match="no region is set; add --region us-east-1, or set AWS_REGION"):
        scan([])
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CredentialsRefused, match=r"profile \(nobody\) could not be found"):
        scan([HOME])


def test_a_region_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(GpuctlError, match=r"AWS does not respond: .*check the region"):
        scan(["us-east-1"])


def test_an_unknown_region_is_one_line() -> None:
    with pytest.raises(BadInput, match="unknown region 'us-esat-1'; for example us-"):
        scan([HOME, "us-esat-1"])


def test_a_region_that_is_not_enabled_is_not_seen(cluster: str) -> None:
    def region(name: str, status: str) -> str:
        return f"<item><regionName>{name}</regionName><optInStatus>{status}</optInStatus></item>"

    listed = region(HOME, "opt-in-not-required") + region("ap-east-1", "not-opted-in")
    answers: Answers = {**NOTHING, ("ec2", "DescribeRegions"): f"<R><regionInfo>{listed}</regionInfo></R>"}
    seen = scan(["ap-east-1", HOME], cluster, answering(answers))
    assert (seen.regions, seen.unseen) == ((HOME,), ("ap-east-1: it is not enabled for this account",))
    assert scan(["all"], cluster, answering(answers)).regions == (HOME,)


def test_who_may_not_list_regions_has_the_named_ones_looked_into(cluster: str) -> None:
    answers: Answers = {**NOTHING, ("ec2", "DescribeRegions"): refusal("UnauthorizedOperation")}
    assert scan([HOME], cluster, answering(answers)).regions == (HOME,)


@pytest.mark.slow
def test_what_is_found_tells_whose_it_is(cluster: str) -> None:
    of = {"id": "0123456789", "owner": "me@laptop", "created": "2026-11-22"}
    Mess([*tags(cluster), *({"Key": f"gpuctl:{key}", "Value": value} for key, value in of.items())], cluster)
    found = scan([HOME], cluster, answering(NOTHING)).found
    assert len(found) > 15
    assert {(one.cluster_id, one.owner, one.created) for one in found} == {tuple(of.values())}


def leaks(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "leaks", "--provider", "aws", *args],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.slow
def test_the_verb_lists_what_is_there_and_fails(cluster: str) -> None:
    """Straight against moto, which answers for two kinds with an error: that is told, and the rest is found."""
    mess = Mess(tags(cluster), cluster)
    done = leaks("-c", cluster)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["CLUSTER", "KIND", "ID", "ABOUT", "REGION", "$/H"]
    assert lines[1].split()[:3] == [cluster, "instance", mess.made["instance"]]
    assert len(lines) == 1 + len(mess.made)
    said = done.stderr.splitlines()
    assert [line.partition(" in ")[0] for line in said[:-1]] == [
        "not checked: placement groups",
        "not checked: instance connect endpoints",
        "looked",
    ]
    assert said[0].endswith(": the response is not from AWS's API")
    assert said[-1] == f"error: {len(mess.made)} things there, $22.03/h; {REMOVES}"
    told = json.loads(leaks("-c", cluster, "--region", HOME, "-o", "json").stdout)
    assert {(one["kind"], one["id"]) for one in told["found"]} == set(mess.made.items())


@pytest.mark.slow
def test_a_scan_that_could_not_look_everywhere_is_no_proof(cluster: str) -> None:
    done = leaks("-c", cluster)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "error: not everything could be checked; this list may be incomplete"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--provider", "local"), "error: provider local is not a cloud; use one of: aws, gcp, azure\n"),
        (("-o", "xml"), "error: --output xml is not a format; use text or json\n"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], said: str) -> None:
    done = leaks(*args)
    assert (done.returncode, done.stderr) == (2, said)
