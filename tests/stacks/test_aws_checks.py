"""``check`` on AWS. Moto 5.2 knows identity, regions, zones and instances; it simulates no policies, has no quotas of
EC2 and refuses nothing, so those answers are recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gpuctl.stacks.aws.checks import checks, quota_code
from gpuctl.stacks.cloud import Check
from gpuctl.stacks.machines import catalog
from tests.stacks.recorded import Answers, answering, json_refusal, query_refusal, refusal
from tests.stacks.samples import asked

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


def quota(value: float) -> str:
    return json.dumps({"Quota": {"QuotaName": SPOT_P, "QuotaCode": "L-7212CCBC", "Value": value}})


def simulated(**denied: str) -> str:
    decisions = {"ec2:CreateVpc": "allowed", "ec2:RunInstances": "allowed", **denied}
    results = "".join(
        f"<member><EvalActionName>{action}</EvalActionName><EvalDecision>{decision}</EvalDecision></member>"
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
}


def checked(answers: Answers, asked_: list[bytes] | None = None, **changes: Any) -> dict[str, Check]:
    """Of four p4d.24xlarge, 96 vCPUs each, as spot in us-east-1a."""
    request = asked("aws", **changes)
    machine = catalog().type(request.type)
    return {one.name: one for one in checks(request, machine, answering({**GOOD, **answers}, asked_))}


def test_all_is_well_where_the_cloud_says_so() -> None:
    found = checked({})
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(
        ("credentials", "region", "machines", "permissions", "quota"), "ok"
    )
    assert found["quota"].message == f"{SPOT_P}: 384 vCPUs, 0 in use, 384 for 4 x p4d.24xlarge"


def test_a_role_is_simulated_by_its_whole_name() -> None:
    """The name of its session lacks the path."""
    asked_: list[bytes] = []
    checked({}, asked_)
    (simulation,) = [body for body in asked_ if b"SimulatePrincipalPolicy" in body]
    assert b"role%2Fsome%2Fpath%2FAdmin" in simulation
    assert b"autoscaling%3ACreateAutoScalingGroup" in simulation


@pytest.mark.parametrize("value", [383, 0])
def test_a_quota_that_is_too_small_fails_with_the_page_to_raise_it(value: float) -> None:
    found = checked({("service-quotas", "GetServiceQuota"): quota(value)})["quota"]
    assert (found.status, found.page) == (
        "fail",
        "https://us-east-1.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/L-7212CCBC",
    )
    if value == 0:
        assert found.message == f"{SPOT_P} is 0: this account may start no p4d.24xlarge (spot)"


def test_a_quota_that_nobody_has_changed_is_aws_default() -> None:
    answers: Answers = {
        ("service-quotas", "GetServiceQuota"): json_refusal("NoSuchResourceException"),
        ("service-quotas", "GetAWSDefaultServiceQuota"): quota(0),
    }
    assert "is 0" in checked(answers)["quota"].message


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


def test_every_machine_that_is_known_goes_by_some_quota() -> None:
    families = {one.family for one in catalog().types if one.provider == "aws"}
    assert [one for one in families if not (quota_code(one, spot=True) and quota_code(one, spot=False))] == []


def test_actions_that_are_denied_are_named() -> None:
    denied = simulated(**{"iam:PassRole": "implicitDeny", "ec2:RunInstances": "explicitDeny"})
    found = checked({("iam", "SimulatePrincipalPolicy"): denied})["permissions"]
    assert found.status == "fail"
    assert found.message == "these credentials may not call ec2:RunInstances, iam:PassRole"


@pytest.mark.parametrize(
    ("rehearsed", "status", "said"),
    [
        ("DryRunOperation", "unknown", "networks may be made"),
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
    assert nowhere.message == "there is no p4d.24xlarge in eu-west-3; take another --region or --type"


def test_a_region_that_is_not_enabled_fails() -> None:
    regions = (
        "<R><regionInfo><item><regionName>us-east-1</regionName><optInStatus>not-opted-in</optInStatus></item>"
        "</regionInfo></R>"
    )
    found = checked({("ec2", "DescribeRegions"): regions})["region"]
    assert (found.status, found.message) == ("fail", "us-east-1 is not enabled")


def test_expired_credentials_are_all_that_can_be_told() -> None:
    found = checked({("sts", "GetCallerIdentity"): query_refusal("ExpiredToken")})
    assert list(found) == ["credentials"]
    assert found["credentials"].message.startswith("the AWS credentials have expired; log in")


def test_credentials_of_another_account_fail() -> None:
    found = checked({}, account="210987654321")["credentials"]
    assert found.message == "they are of account 123456789012, and not of 210987654321"


def check(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "check", *args], capture_output=True, text=True, timeout=90
    )


def test_the_verb_prints_a_line_for_each_check() -> None:
    """Straight against moto, which knows no quotas."""
    done = check("--provider", "aws", "--type", "p4d.24xlarge", "--nodes", "4")
    lines = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    assert (lines["credentials"], lines["region"], lines["machines"], lines["quota"]) == ("ok", "ok", "ok", "fail")
    assert done.returncode == 1
    assert "AWS answered 500 to GetAWSDefaultServiceQuota; try again later" in done.stdout
    assert done.stderr == "error: 2 checks failed: permissions, quota\n"


def test_the_verb_tells_of_missing_credentials_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    done = check("--provider", "aws", "--type", "p4d.24xlarge", "-o", "json")
    (only,) = json.loads(done.stdout)["checks"]
    assert (only["name"], only["status"]) == ("credentials", "fail")
    assert only["message"].startswith("there are no AWS credentials")
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "error: 'local' is no cloud; add --provider, one of: aws, gcp, azure\n"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], said: str) -> None:
    done = check(*args)
    assert (done.returncode, done.stderr) == (2, said)
