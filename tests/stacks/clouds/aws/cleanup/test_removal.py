"""What ``leaks`` has found is deleted: on moto, made as strict and as slow as AWS (``strict_aws``)."""

from __future__ import annotations

import json
import sys
import uuid

import boto3
import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.answers import CredentialsRefused, Leftover
from gpuctl.stacks.clouds.aws.cleanup.leaks import scan
from gpuctl.stacks.clouds.aws.cleanup.removal import remove
from tests.fakes.aws.recorded import answering, query_refusal, refusal
from tests.fakes.aws.strict import StrictAws
from tests.stacks.clouds.aws.cleanup.test_leaks import HOME, NOTHING, Mess, tags

pytestmark = pytest.mark.usefixtures("aws_account")


POLICY = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}]}
)


@pytest.fixture
def cluster() -> str:
    return f"c{uuid.uuid4().hex[:8]}"


class Whole(Mess):
    """As the program makes it: a role in a profile, groups whose rules name each other, a group with a machine."""

    def __init__(self, cluster: str, aws: StrictAws) -> None:
        super().__init__(tags(cluster), cluster)
        self.iam = boto3.client("iam", region_name=HOME)
        role = self.made["role"]
        self.iam.put_role_policy(RoleName=role, PolicyName="nodes", PolicyDocument=POLICY)
        self.policy = self.iam.create_policy(PolicyName=cluster, PolicyDocument=POLICY)["Policy"]
        self.iam.attach_role_policy(RoleName=role, PolicyArn=self.policy["Arn"])
        self.iam.add_role_to_instance_profile(InstanceProfileName=self.made["instance profile"], RoleName=role)
        self.ec2.associate_route_table(RouteTableId=self.made["route table"], SubnetId=self.made["subnet"])
        self._rules()
        self.autoscaling = boto3.client("autoscaling", region_name=HOME)
        self.autoscaling.set_desired_capacity(AutoScalingGroupName=cluster, DesiredCapacity=1)
        aws.placement_groups.add(cluster)
        aws.endpoints[f"eice-{cluster}"] = self.made["subnet"]

    def _rules(self) -> None:
        nodes = self.made["security group"]
        endpoint = self.ec2.create_security_group(
            VpcId=self.made["VPC"], GroupName="ssh", Description="ssh", TagSpecifications=self._with("security-group")
        )["GroupId"]
        for one, other in ((nodes, nodes), (nodes, endpoint), (endpoint, nodes)):
            rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": other}]}]
            self.ec2.authorize_security_group_ingress(GroupId=one, IpPermissions=rule)
            self.ec2.authorize_security_group_egress(GroupId=one, IpPermissions=rule)


def removed(aws: StrictAws, found: tuple[Leftover, ...]) -> list[str]:
    """What was said."""
    said: list[str] = []
    remove(found, said.append, aws.connect, aws.pause, lambda: aws.now)
    return said


@pytest.mark.slow
def test_all_that_leaks_finds_is_deleted(cluster: str) -> None:
    aws = StrictAws({"gpuctl:cluster": cluster})
    mess = Whole(cluster, aws)
    neighbour = Mess(tags(f"{cluster}2"), f"{cluster}-next")
    stranger = Mess([{"Key": "Name", "Value": cluster}], f"{cluster}-theirs")
    before = scan([HOME], cluster, aws.connect)
    assert len(before.found) >= len(mess.made) + 4
    said = removed(aws, before.found)
    assert not [line for line in said if "still there" in line]
    after = scan([HOME], cluster, aws.connect)
    assert (after.found, after.unseen) == ((), ())
    assert (aws.placement_groups, aws.endpoints) == (set(), {})
    theirs = scan([HOME], f"{cluster}2", answering(NOTHING)).found
    assert {(one.kind, one.id) for one in theirs} == set(neighbour.made.items())
    assert stranger.ec2.describe_vpcs(VpcIds=[stranger.made["VPC"]])["Vpcs"]
    assert stranger.iam_role_is_there()
    assert mess.iam.get_policy(PolicyArn=mess.policy["Arn"])


@pytest.mark.slow
def test_what_has_gone_already_is_no_failure(cluster: str) -> None:
    aws = StrictAws({"gpuctl:cluster": cluster})
    Whole(cluster, aws)
    found = scan([HOME], cluster, aws.connect).found
    removed(aws, found)
    assert not [line for line in removed(aws, found) if not line.startswith(("deleted", "waiting"))]


@pytest.mark.slow
def test_what_a_stranger_uses_is_named_with_awss_reason(cluster: str) -> None:
    aws = StrictAws({"gpuctl:cluster": cluster})
    mess = Mess(tags(cluster), cluster)
    card = mess.ec2.create_network_interface(SubnetId=mess.made["subnet"])["NetworkInterface"]["NetworkInterfaceId"]
    said = removed(aws, scan([HOME], cluster, aws.connect).found)
    refused = [line for line in said if "still there" in line]
    subnet = mess.made["subnet"]
    assert refused[0] == (
        f"subnet {subnet} in {HOME} is still there: AWS refused DeleteSubnet: DependencyViolation: "
        f"The subnet '{subnet}' has dependencies and cannot be deleted."
    )
    assert [line.partition(" ")[0] for line in refused] == ["subnet", "VPC"]
    assert mess.ec2.describe_network_interfaces(NetworkInterfaceIds=[card])["NetworkInterfaces"]
    assert aws.now < 1200
    left = {one.kind for one in scan([HOME], cluster, aws.connect).found}
    assert left == {"subnet", "VPC"}


@pytest.mark.slow
def test_what_may_not_be_deleted_is_told_and_the_rest_goes(cluster: str) -> None:
    mess = Mess(tags(cluster), cluster)
    aws = StrictAws(
        {"gpuctl:cluster": cluster},
        {"DeleteVolume": refusal("UnauthorizedOperation"), "DeleteRole": query_refusal("AccessDenied")},
    )
    said = removed(aws, scan([HOME], cluster, aws.connect).found)
    volume, role = f"volume {mess.made['volume']} in {HOME}", f"role {mess.made['role']}"
    assert f"{volume} is still there: these AWS credentials may not call DeleteVolume" in said
    assert f"{role} is still there: these AWS credentials may not call DeleteRole" in said
    assert {one.kind for one in scan([HOME], cluster, aws.connect).found} == {"volume", "role"}


def test_credentials_that_expire_end_it(cluster: str) -> None:
    aws = StrictAws({}, {"TerminateInstances": query_refusal("ExpiredToken")})
    found = Leftover(cluster=cluster, kind="instance", id="i-1", region=HOME)
    with pytest.raises(CredentialsRefused, match="have expired"):
        removed(aws, (found,))


def test_a_kind_that_is_not_known_is_told(cluster: str) -> None:
    said: list[str] = []
    remove([Leftover(cluster=cluster, kind="lamp", id="l-1", region=HOME)], said.append, answering(NOTHING))
    assert said == [f"lamp l-1 in {HOME}: gpuctl does not know how to delete it"]


def test_every_kind_that_leaks_knows_can_be_deleted() -> None:
    from gpuctl.stacks.clouds.aws.cleanup.deletions import STAGES
    from gpuctl.stacks.clouds.aws.cleanup.leaks import KINDS

    assert {kind.what for kind in KINDS} | {"role", "instance profile", "security group rule"} == {
        one.kind for stage in STAGES for one in stage
    }


def test_without_boto3_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(BadInput, match="gpuctl-spot\\[aws\\]"):
        remove([Leftover(cluster="c", kind="VPC", id="vpc-1", region=HOME)], lambda _: None)
