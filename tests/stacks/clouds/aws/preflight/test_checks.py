"""``check`` on AWS. Moto 5.2 knows identity, regions, zones and instances; it simulates no policies, has no quotas of
EC2 and refuses nothing, so those answers are recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from urllib.parse import parse_qs

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.answers import PreflightCheck
from gpuctl.stacks.clouds.aws.preflight.checks import checks
from gpuctl.stacks.clouds.aws.preflight.limits import quota_code
from tests.fakes.aws.recorded import Answers, answering, json_refusal, query_refusal, refusal
from tests.fakes.requests import asked

pytestmark = pytest.mark.usefixtures("aws_account")

SPOT_P = "All P4, P3 and P2 Spot Instance Requests"
ROLE_SESSION = (
    '<R xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
    "<Arn>arn:aws:sts::123456789012:assumed-role/Admin/me</Arn><Account>123456789012</Account>"
    "</GetCallerIdentityResult></R>"
)
ROLE = (
    '<R xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><GetRoleResult><Role>'
    "<Arn>arn:aws:iam::123456789012:role/some/path/Admin</Arn><RoleName>Admin</RoleName></Role></GetRoleResult></R>"
)


def quota(value: float, name: str = SPOT_P) -> str:
    return json.dumps({"Quota": {"QuotaName": name, "QuotaCode": "L-7212CCBC", "Value": value}})


def simulated(*, more: str = "", **denied: str) -> str:
    """``more``: of each that is denied."""
    decisions = {"ec2:CreateVpc": "allowed", "ec2:RunInstances": "allowed", **denied}
    results = "".join(
        f"<member><EvalActionName>{action}</EvalActionName><EvalDecision>{decision}</EvalDecision>"
        f"{more if action in denied else ''}</member>"
        for action, decision in decisions.items()
    )
    return (
        '<R xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><SimulatePrincipalPolicyResult>'
        f"<IsTruncated>false</IsTruncated><EvaluationResults>{results}</EvaluationResults>"
        "</SimulatePrincipalPolicyResult></R>"
    )


GOOD: Answers = {
    ("sts", "GetCallerIdentity"): ROLE_SESSION,
    ("iam", "GetRole"): ROLE,
    ("iam", "SimulatePrincipalPolicy"): simulated(),
    ("service-quotas", "GetServiceQuota"): quota(384),
    ("ec2", "GetEbsDefaultKmsKeyId"): "<R><kmsKeyId>alias/aws/ebs</kmsKeyId></R>",
}


def checked(answers: Answers, asked_: list[bytes] | None = None, **changes: Any) -> dict[str, PreflightCheck]:
    """Of four p4d.24xlarge, 96 vCPUs each, as spot in us-east-1a."""
    request = asked("aws", **changes)
    machine = catalog().type(request.type)
    return {one.name: one for one in checks(request, machine, answering({**GOOD, **answers}, asked_))}


@pytest.mark.slow
def test_all_is_well_where_the_cloud_says_so() -> None:
    found = checked({})
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(
        ("credentials", "region", "machines", "disks", "permissions", "quota", "network limits"), "ok"
    )
    assert found["quota"].message == f"{SPOT_P}: 384 vCPUs, 0 in use, 384 for 4 x p4d.24xlarge"


def test_a_role_is_simulated_by_its_whole_name() -> None:
    """The name of its session lacks the path."""
    asked_: list[bytes] = []
    checked({}, asked_)
    simulations = [body for body in asked_ if b"SimulatePrincipalPolicy" in body]
    assert all(b"role%2Fsome%2Fpath%2FAdmin" in body for body in simulations)
    assert any(b"autoscaling%3ACreateAutoScalingGroup" in body for body in simulations)


@pytest.mark.parametrize("value", [383, 0])
def test_a_quota_that_is_too_small_fails_with_the_page_to_raise_it(value: float) -> None:
    found = checked({("service-quotas", "GetServiceQuota"): quota(value)})["quota"]
    assert (found.status, found.page) == (
        "fail",
        "https://us-east-1.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/L-7212CCBC",
    )
    if value == 0:
        assert found.message == f"{SPOT_P} is 0: this account may not start any p4d.24xlarge (spot)"


def test_a_quota_that_nobody_has_changed_is_aws_default() -> None:
    answers: Answers = {
        ("service-quotas", "GetServiceQuota"): json_refusal("NoSuchResourceException"),
        ("service-quotas", "GetAWSDefaultServiceQuota"): quota(0),
    }
    assert "is 0" in checked(answers)["quota"].message


@pytest.mark.slow
def test_what_runs_already_counts_but_for_the_clusters_own() -> None:
    def instance(kind: str, lifecycle: str = "spot", cluster: str = "other") -> str:
        return (
            f"<item><instanceType>{kind}</instanceType><instanceLifecycle>{lifecycle}</instanceLifecycle>"
            "<cpuOptions><coreCount>48</coreCount><threadsPerCore>2</threadsPerCore></cpuOptions>"
            f"<tagSet><item><key>gpuctl:cluster</key><value>{cluster}</value></item></tagSet></item>"
        )

    running = "".join(
        (
            instance("p4de.24xlarge"),
            instance("p4d.24xlarge", cluster="demo"),
            instance("p5.48xlarge"),
            instance("g5.48xlarge"),
            instance("p4d.24xlarge", lifecycle=""),
        )
    )
    answers: Answers = {
        ("ec2", "DescribeInstances"): f"<R><reservationSet><item><instancesSet>{running}</instancesSet></item>"
        "</reservationSet></R>"
    }
    found = checked(answers)["quota"]
    assert (found.status, found.message) == ("fail", f"{SPOT_P}: 384 vCPUs, 96 in use, 384 for 4 x p4d.24xlarge")


@pytest.mark.parametrize(
    ("family", "spot", "on_demand"),
    [
        ("p4d", "L-7212CCBC", "L-417A185B"),
        ("p3dn", "L-7212CCBC", "L-417A185B"),
        ("p5en", "L-C4BD4855", "L-417A185B"),
        ("g6e", "L-3819A6DF", "L-DB2E81BA"),
        ("p6-b200", "", "L-417A185B"),
        ("m7i", "", ""),
    ],
)
def test_a_family_goes_by_its_own_quota(family: str, spot: str, on_demand: str) -> None:
    assert (quota_code(family, spot=True), quota_code(family, spot=False)) == (spot, on_demand)


def test_every_machine_that_is_known_goes_by_some_quota_but_for_spot_machines_of_p6_b200() -> None:
    families = {one.family for one in catalog().types if one.provider == "aws"}
    unknown = [(one, spot) for one in families for spot in (True, False) if not quota_code(one, spot=spot)]
    assert unknown == [("p6-b200", True)]


def test_actions_that_are_denied_are_named() -> None:
    denied = simulated(**{"iam:PassRole": "implicitDeny", "ec2:RunInstances": "explicitDeny"})
    found = checked({("iam", "SimulatePrincipalPolicy"): denied})["permissions"]
    assert found.status == "fail"
    assert found.message == "these credentials may not call ec2:RunInstances, iam:PassRole"


@pytest.mark.parametrize(
    ("rehearsed", "status", "said"),
    [
        ("DryRunOperation", "unknown", "networks may be created"),
        ("UnauthorizedOperation", "fail", "these credentials may not call ec2:CreateVpc"),
    ],
)
def test_who_may_not_ask_iam_has_the_calls_rehearsed(rehearsed: str, status: str, said: str) -> None:
    answers: Answers = {
        ("iam", "SimulatePrincipalPolicy"): query_refusal("AccessDenied"),
        ("ec2", "CreateVpc"): refusal(rehearsed, status=412),
        ("ec2", "AllocateAddress"): refusal("DryRunOperation", status=412),
        ("ec2", "CreateInternetGateway"): refusal("DryRunOperation", status=412),
    }
    found = checked(answers)["permissions"]
    assert found.status == status
    assert found.message.startswith(said)


def test_what_may_not_be_asked_is_unknown_and_the_rest_is_told() -> None:
    found = checked({("service-quotas", "GetServiceQuota"): json_refusal("AccessDeniedException")})
    assert (found["quota"].status, found["machines"].status) == ("unknown", "ok")


def test_a_zone_or_a_region_without_the_machine_fails() -> None:
    elsewhere = checked({}, zones=("us-east-1z",))["machines"]
    assert elsewhere.status == "fail"
    assert elsewhere.message.startswith("there is no p4d.24xlarge in us-east-1z; --zone us-east-1a or ")
    nowhere = checked({}, region="eu-west-3", zones=("eu-west-3a",))["machines"]
    assert nowhere.message == "there is no p4d.24xlarge in eu-west-3; use another --region or --type"


def test_a_region_that_is_not_enabled_fails() -> None:
    regions = (
        "<R><regionInfo><item><regionName>us-east-1</regionName><optInStatus>not-opted-in</optInStatus></item>"
        "</regionInfo></R>"
    )
    found = checked({("ec2", "DescribeRegions"): regions})["region"]
    assert (found.status, found.message) == ("fail", "us-east-1 is not enabled for this account")


def test_expired_credentials_are_all_that_can_be_told() -> None:
    found = checked({("sts", "GetCallerIdentity"): query_refusal("ExpiredToken")})
    assert list(found) == ["credentials"]
    assert found["credentials"].message.startswith("the AWS credentials have expired; log in")


def test_credentials_of_another_account_fail() -> None:
    found = checked({}, account="210987654321")["credentials"]
    assert found.message == "they belong to account 123456789012, not to 210987654321"


def simulations(**changes: Any) -> dict[str, dict[str, list[str]]]:
    """What was asked, by its resource."""
    asked_: list[bytes] = []
    checked({}, asked_, **changes)
    parsed = [parse_qs(body.decode()) for body in asked_ if b"SimulatePrincipalPolicy" in body]
    return {one["ResourceArns.member.1"][0]: one for one in parsed}


def test_rights_are_simulated_on_what_they_are_used_on() -> None:
    """Where no resource is named IAM takes ``*``, which rights for ``role/gpuctl-*`` do not cover."""
    found = simulations()
    (role,) = [arn for arn in found if arn.startswith("arn:aws:iam::123456789012:role/gpuctl-demo-")]
    assert "iam:PassRole" in [value for (value,) in found[role].values()]
    assert "iam:CreateRole" in [value for (value,) in found[role].values()]
    buckets = [arn for arn in found if arn.startswith("arn:aws:s3:::gpuctl-demo-")]
    assert len(buckets) == 1
    assert "*" not in found
    context = list(found[role].values())
    assert ["iam:PassedToService"] in context
    assert ["aws:RequestTag/gpuctl:cluster"] in context


def test_rights_that_a_request_does_not_need_are_not_asked_for() -> None:
    """As for a gateway, for machines with public addresses."""
    every = set(simulations())
    few = set(simulations(type="g5.xlarge", ssh_key="", bucket="s3://mine/runs", image="ami-12c6146b"))
    words = {arn.partition("/")[0].rpartition(":")[2] for arn in every - few}
    assert {"natgateway", "elastic-ip", "instance-connect-endpoint", "placement-group", "key-pair"} <= words


def test_a_bucket_of_their_own_that_is_left_over_is_guarded_anew_and_needs_the_rights() -> None:
    own = asked("aws").bucket_url()
    left, mine = set(simulations(bucket=own)), set(simulations(bucket="s3://mine/runs"))
    assert [arn.partition(":::")[2] for arn in left - mine] == [own.removeprefix("s3://").partition("/")[0]]


def test_arns_are_of_the_regions_partition() -> None:
    answers: Answers = {
        ("ec2", "DescribeRegions"): "<R><regionInfo><item><regionName>cn-north-1</regionName></item></regionInfo></R>"
    }
    asked_: list[bytes] = []
    checked(answers, asked_, region="cn-north-1", zones=("cn-north-1a",))
    parsed = [parse_qs(body.decode()) for body in asked_ if b"SimulatePrincipalPolicy" in body]
    assert {one["ResourceArns.member.1"][0].split(":")[1] for one in parsed} == {"aws-cn"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "<OrganizationsDecisionDetail><AllowedByOrganizations>false</AllowedByOrganizations>"
            "</OrganizationsDecisionDetail>",
            " (by a policy of the organization)",
        ),
        (
            "<PermissionsBoundaryDecisionDetail><AllowedByPermissionsBoundary>false</AllowedByPermissionsBoundary>"
            "</PermissionsBoundaryDecisionDetail>",
            " (by the permissions boundary)",
        ),
    ],
)
def test_who_denies_is_told(more: str, said: str) -> None:
    answers: Answers = {
        ("iam", "SimulatePrincipalPolicy"): simulated(more=more, **{"ec2:RunInstances": "explicitDeny"})
    }
    found = checked(answers)["permissions"]
    assert (found.status, found.message) == ("fail", f"these credentials may not call ec2:RunInstances{said}")


def test_a_condition_that_iam_cannot_know_refuses_nobody() -> None:
    more = "<MissingContextValues><member>aws:MultiFactorAuthPresent</member></MissingContextValues>"
    answers: Answers = {
        ("iam", "SimulatePrincipalPolicy"): simulated(more=more, **{"ec2:RunInstances": "implicitDeny"})
    }
    found = checked(answers)["permissions"]
    assert found.status == "unknown"
    assert found.message == "whether they may call ec2:RunInstances depends on aws:MultiFactorAuthPresent"


def test_who_cannot_be_simulated_has_the_calls_rehearsed() -> None:
    """As a federated user, whom IAM takes for bad input."""
    answers: Answers = {
        ("iam", "SimulatePrincipalPolicy"): query_refusal("InvalidInput", status=400),
        **{
            ("ec2", call): refusal("DryRunOperation", status=412)
            for call in ("CreateVpc", "AllocateAddress", "CreateInternetGateway")
        },
    }
    assert checked(answers)["permissions"].status == "unknown"


def test_a_limit_of_networks_that_is_reached_fails() -> None:
    vpcs = "".join(f"<item><vpcId>vpc-{number}</vpcId></item>" for number in range(5))
    answers: Answers = {
        ("ec2", "DescribeVpcs"): f"<R><vpcSet>{vpcs}</vpcSet></R>",
        ("service-quotas", "GetServiceQuota"): quota(5, "VPCs per Region"),
    }
    found = checked(answers)["network limits"]
    assert (found.status, found.message) == ("fail", "VPCs per Region: 5, 5 in use, and this needs one more")
    assert found.page.endswith("/servicequotas/home/services/vpc/quotas/L-F678F1CE")


@pytest.mark.parametrize(
    ("call", "items", "kind"),
    [
        ("DescribeInternetGateways", ("internetGatewaySet", "internetGatewayId"), "L-A4707A72"),
        ("DescribeAddresses", ("addressesSet", "allocationId"), "L-0263D0A3"),
    ],
)
def test_other_limits_count_without_the_clusters_own(call: str, items: tuple[str, str], kind: str) -> None:
    def some(owner: str) -> Answers:
        tag = f"<tagSet><item><key>gpuctl:cluster</key><value>{owner}</value></item></tagSet>"
        told = "".join(f"<item><{items[1]}>x-{number}</{items[1]}>{tag}</item>" for number in range(400))
        return {("ec2", call): f"<R><{items[0]}>{told}</{items[0]}></R>"}

    assert checked(some("demo"))["network limits"].status == "ok"
    found = checked(some("other"))["network limits"]
    assert (found.status, found.page.rpartition("/")[2]) == ("fail", kind)


@pytest.mark.slow
def test_gateways_count_in_the_zone_that_is_asked_for() -> None:
    def gateways(state: str) -> Answers:
        one = f"<item><natGatewayId>nat-1</natGatewayId><subnetId>subnet-1</subnetId><state>{state}</state></item>"
        subnet = "<item><subnetId>subnet-1</subnetId><availabilityZone>us-east-1a</availabilityZone></item>"
        return {
            ("ec2", "DescribeNatGateways"): f"<R><natGatewaySet>{one * 400}</natGatewaySet></R>",
            ("ec2", "DescribeSubnets"): f"<R><subnetSet>{subnet}</subnetSet></R>",
        }

    found = checked(gateways("available"))["network limits"]
    assert (found.status, found.page.rpartition("/")[2]) == ("fail", "L-FE5A380F")
    assert checked(gateways("available"), zones=("us-east-1b",))["network limits"].status == "ok"
    assert checked(gateways("deleted"))["network limits"].status == "ok"


def test_limits_that_may_not_be_asked_refuse_nobody() -> None:
    assert checked({("ec2", "DescribeVpcs"): refusal("UnauthorizedOperation")})["network limits"].status == "unknown"
    assert (
        checked({("ec2", "DescribeVpcs"): refusal("InternalError", status=500)})["network limits"].status == "unknown"
    )


def test_a_disk_key_of_the_accounts_own_is_told() -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1"
    found = checked({("ec2", "GetEbsDefaultKmsKeyId"): f"<R><kmsKeyId>{key}</kmsKeyId></R>"})["disks"]
    assert found.status == "unknown"
    assert "must let AWSServiceRoleForAutoScaling use it" in found.message


def test_an_image_that_is_not_there_fails() -> None:
    gone = refusal("InvalidAMIID.NotFound", "The image id '[ami-1]' does not exist", 400)
    found = checked({("ec2", "DescribeImages"): gone}, image="ami-1")["image"]
    assert (found.status, "does not exist" in found.message) == ("fail", True)
    image = "<item><imageState>available</imageState><architecture>arm64</architecture></item>"
    arm = f"<R><imagesSet>{image}</imagesSet></R>"
    assert "arm64" in checked({("ec2", "DescribeImages"): arm}, image="ami-1")["image"].message


def test_an_unknown_region_is_named_and_all_that_is_told() -> None:
    found = checked({}, region="us-esat-1", zones=())
    assert list(found) == ["credentials", "region"]
    assert found["region"].message.startswith("unknown region 'us-esat-1'; for example us-")


def test_without_boto3_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(BadInput, match=r"aws needs boto3, which is not installed; pip install 'gpuctl-spot\[aws\]'"):
        checks(asked("aws"), catalog().type("p4d.24xlarge"))


def check(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "check", *args], capture_output=True, text=True, timeout=90
    )


@pytest.mark.slow
@pytest.mark.usefixtures("pulumi_on_path")
def test_the_verb_prints_a_line_for_each_check() -> None:
    """Straight against moto, which knows no quotas, in a region where no other test makes networks."""
    done = check("--provider", "aws", "--region", "us-west-2", "--type", "p4d.24xlarge", "--nodes", "4")
    lines = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    assert (lines["credentials"], lines["region"], lines["machines"], lines["quota"]) == ("ok", "ok", "ok", "fail")
    assert done.returncode == 1
    assert "AWS answered 500 to GetAWSDefaultServiceQuota; try again later" in done.stdout
    assert done.stderr.endswith("error: 1 check failed: quota\n")


def test_the_verb_tells_of_missing_credentials_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    done = check("--provider", "aws", "--type", "p4d.24xlarge", "-o", "json")
    (only, *here) = json.loads(done.stdout)["checks"]
    assert [one["name"] for one in here] == ["pulumi", "plug-in"]
    assert (only["name"], only["status"]) == ("credentials", "fail")
    assert only["message"].startswith("no AWS credentials found")
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "error: provider local is not a cloud; use one of: aws, gcp, azure\n"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], said: str) -> None:
    done = check(*args)
    assert (done.returncode, done.stderr) == (2, said)
