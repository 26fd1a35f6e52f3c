"""``up``, ``repair`` and ``down`` of a rented cluster by the real command line: the real engine and programs, with a
program that stands in for Pulumi's CLI (``pulumi_cli``) and a moto server for AWS. The test plays the machines: it says
with a heartbeat that a machine has become a node.

What moto 5.2 cannot do: placement groups, spot in a group, machines that do not come (the group is refused its size
instead), placement scores.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import boto3
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import open_bucket
from gpuctl.cluster.records import ClusterSpec, decode
from gpuctl.stacks.failures import Failure, StackFailed
from gpuctl.stacks.rented import Rented
from gpuctl.stacks.request import StackRequest
from tests.stacks.renting import User
from tests.stacks.samples import asked
from tests.stacks.test_aws_checks import quota, simulated
from tests.stacks.test_aws_leaks import NOTHING

TYPE = "g5.xlarge"


class Account(User):
    """Of AWS, on moto."""

    up_flags = ("--provider", "aws", "--type", TYPE)

    def __init__(self, folder: Path, endpoint: str, without: list[str], vcpus: list[int]) -> None:
        super().__init__(folder, {"AWS_ENDPOINT_URL": endpoint})
        self.without = without
        """Zones that give no machines."""
        self.vcpus = vcpus
        """Quotas, the last one in force."""
        self.groups = boto3.client("autoscaling", region_name="us-east-1")

    def group(self) -> dict[str, Any]:
        """The cluster's own, by its tag."""
        pages = self.groups.get_paginator("describe_auto_scaling_groups").paginate()
        found = [group for page in pages for group in page["AutoScalingGroups"] if self._is_ours(group)]
        assert len(found) == 1, found
        return dict(found[0])

    def machines(self) -> list[str]:
        return [one["InstanceId"] for one in self.group()["Instances"]]

    def rules(self) -> list[dict[str, Any]]:
        """Of who may reach whom."""
        ec2 = boto3.client("ec2", region_name="us-east-1")
        ours = [{"Name": "tag:gpuctl:cluster", "Values": [self.cluster]}]
        groups = [one["GroupId"] for one in ec2.describe_security_groups(Filters=ours)["SecurityGroups"]]
        of_ours = [{"Name": "group-id", "Values": groups}]
        return list(ec2.describe_security_group_rules(Filters=of_ours)["SecurityGroupRules"])

    def _is_ours(self, group: dict[str, Any]) -> bool:
        return any((tag["Key"], tag["Value"]) == ("gpuctl:cluster", self.cluster) for tag in group["Tags"])


@pytest.fixture
def account(aws_account: None, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    del aws_account
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    without: list[str] = []
    vcpus = [384]
    with amazon(s3_endpoint, without, vcpus) as endpoint, Account(tmp_path, endpoint, without, vcpus) as account:
        yield account


def test_up_makes_machines_that_find_gpuctl_in_the_bucket_and_down_leaves_the_bucket_alone(account: Account) -> None:
    account.boot_machines()
    done = account.up()
    assert f"cluster {account.cluster} is up: 2 nodes (aws)" in done.stdout
    group = account.group()
    assert (group["DesiredCapacity"], group["MaxSize"], group["MinSize"]) == (2, 2, 0)
    assert all(f"{name} is live" in done.stderr for name in account.machines())
    bucket = account.bucket()
    spec = decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)
    assert (spec.name, spec.provider, spec.nodes_max, spec.slots) == (account.cluster, "aws", 2, 1)
    (wheel,) = [entry.key for entry in bucket.list(layout.BOOT) if entry.key.endswith(".whl")]
    assert wheel in account.last_up()["user_data"], "the machines are told of another wheel than the one that is there"
    assert account.last_up_path().stat().st_mode & 0o077 == 0

    line = "error: aws takes machines when it wants to; try it on --provider local\n"
    assert account.run("preempt", account.machines()[0], code=2).stderr == line
    done = account.run("down", "-y", "--delete-checkpoints", "other", code=2)
    assert done.stderr == f"error: --delete-checkpoints other is not the cluster that goes; that is {account.cluster}\n"
    assert len(account.machines()) == 2
    bucket.put("jobs/a-1/checkpoints/part", b"kept")
    done = account.run("down", "-y")
    assert done.stdout.splitlines()[0] == f"cluster {account.cluster} is down"
    assert account.run("leaks", "--provider", "aws").stdout == ""
    assert [entry.key for entry in bucket.list("")] == ["jobs/a-1/checkpoints/part"]
    assert account.run("status", code=2).stderr.startswith(f"error: there is no cluster named '{account.cluster}'")


def test_it_grows_is_repaired_and_comes_back_with_the_bucket_that_down_has_left(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    (first,) = account.machines()
    token = account.spec().token
    rules = len(account.rules())
    account.up("--idle-minutes", "60", "--ssh-from", "203.0.113.7/32", nodes="1:3")
    assert len(account.machines()) == 3 and first in account.machines()
    assert (account.group()["MaxSize"], account.declared("Group")["maxSize"]) == (3, 3)
    assert account.group()["LaunchTemplate"]["Version"] == "2", "new machines are told what the old ones were"
    assert len(account.rules()) == rules + 1
    assert account.spec().token == token

    group = account.group()["AutoScalingGroupName"]
    account.groups.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=1)
    assert account.run("repair").stdout == f"cluster {account.cluster} is whole\n"
    assert len(account.machines()) == 3

    url = account.known().bucket
    account.run("down", "-y")
    account.up(nodes="1")
    assert account.known().bucket == url
    account.run("down", "-y", "--delete-checkpoints", account.cluster)
    assert open_bucket(url).list("") == []


def test_machines_that_cannot_boot_are_named_with_their_reason(account: Account) -> None:
    account.boot_machines(lambda _name: False)
    done = account.up(code=1)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"error: i-\w+ could not boot: driver: nvidia-smi finds no GPU; see gpuctl logs --boot i-\w+", last
    )
    log = account.run("logs", "--boot", last.rsplit(" ", 1)[1])
    assert "failed" in log.stderr
    account.run("down", "-y")


def test_with_fewer_than_asked_for_it_goes_on_once_they_had_their_time(account: Account) -> None:
    lucky: list[str] = []

    def comes(name: str) -> bool:
        lucky.append(name)
        return len(lucky) == 1

    account.boot_machines(comes)
    began = time.monotonic()
    done = account.up("--wait", "0.1", nodes="1:2")
    assert time.monotonic() - began > 6
    assert "could not boot" in done.stderr
    account.run("down", "-y")


def test_a_zone_without_machines_is_cleared_and_the_next_one_is_tried(account: Account) -> None:
    account.boot_machines()
    account.without.append("us-east-1a")
    said = account.up("--wait", "0.01").stderr
    assert "zones to try: us-east-1a, us-east-1b" in said
    assert "0 of 2 machines came within 0.01 minutes: We currently do not have sufficient capacity" in said
    assert "giving up us-east-1a, next is us-east-1b" in said and "us-east-1a is cleared" in said
    assert account.group()["AvailabilityZones"] == ["us-east-1b"]
    account.run("down", "-y")


def test_a_type_that_is_sold_in_some_zones_only_is_asked_for_there(account: Account) -> None:
    """moto sells it in b and c."""
    account.boot_machines()
    line = "machines: there is no p4de.24xlarge in us-east-1a; --zone us-east-1b or us-east-1c has it"
    ask = ["--provider", "aws", "--type", "p4de.24xlarge", "--nodes", "1"]
    assert f"error: {line}" in account.run("up", *ask, "-y", "--zone", "us-east-1a", code=2).stderr
    checked = account.run("check", *ask).stdout
    assert "ok       machines     p4de.24xlarge is sold in us-east-1b, us-east-1c\n" in checked
    done = account.run("up", *ask, "-y")
    assert done.stdout.startswith("1 x p4de.24xlarge (8 A100-80GB, spot) in us-east-1, aws\n")
    assert "which zone has them (us-east-1a stands for it)" in done.stderr
    assert account.group()["AvailabilityZones"] == ["us-east-1b"]
    account.run("down", "-y")


def test_what_is_not_said_again_stays_as_it_was(account: Account) -> None:
    account.boot_machines()
    account.up("--zone", "us-east-1c", "--on-demand", "--idle-minutes", "60", nodes="1:2")
    (first, second) = account.machines()
    again = account.run("up", "-y", "--nodes", "1:3")
    assert again.stdout.startswith(f"3 x {TYPE} (1 A10G, on demand) in us-east-1, aws\n")
    assert "zones to try" not in again.stderr
    assert {first, second} < set(account.machines()) and len(account.machines()) == 3
    assert account.group()["AvailabilityZones"] == ["us-east-1c"]
    spec = account.spec()
    assert (spec.idle_minutes, spec.stall_minutes) == (60, 30)
    account.run("up", "-y", "--stall-minutes", "5")
    spec = account.spec()
    assert (spec.idle_minutes, spec.stall_minutes, spec.nodes_min, spec.nodes_max) == (60, 5, 1, 3)

    refused = account.run("up", "--type", "g5.2xlarge", code=2).stderr.splitlines()[-1]  # before anybody is asked
    hint = "run `gpuctl down` first, or choose another name with --cluster"
    assert refused == f"error: {account.cluster} has machines of {TYPE}, not g5.2xlarge; {hint}"
    assert len(account.machines()) == 3
    other = account.run("up", "--provider", "local", code=2).stderr
    line = f"there is a cluster {account.cluster} already, of provider aws"
    assert other == f"error: {line}; choose another name with --cluster, or run `gpuctl down` first\n"
    assert account.known().provider == "aws"
    account.run("down", "-y")


@contextmanager
def amazon(endpoint: str, without: list[str], vcpus: list[int]) -> Iterator[str]:
    """The moto server at ``endpoint``, with answers to what it does not know. Zones that are in ``without`` have no
    machines: AWS agrees to a number there, starts none, and says why when it is asked. A group takes no more than its
    maximum. The last of ``vcpus`` is the account's quota."""

    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = dict(parse_qsl(body.decode(errors="replace")))
            answer, refused = self._own(asked), self._too_many(asked)
            if self.headers.get("X-Amz-Target", "").endswith(".GetServiceQuota"):
                answer = str(quota(vcpus[-1]))
            own = (400 if refused else 200, (refused or answer).encode(), dict[str, str]())
            status, data, headers = own if refused or answer else self._theirs(body)
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)) if self.command != "HEAD" else headers["Content-Length"])
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

        def _own(self, asked: dict[str, str]) -> str:
            action, group = asked.get("Action"), asked.get("AutoScalingGroupName", "")
            if action == "SetDesiredCapacity" and set(_found(group)["AvailabilityZones"]) <= set(without):
                return f"<SetDesiredCapacityResponse {_NAMESPACE}/>"
            return _UNKNOWN_TO_MOTO.get(action or "", "")

        def _too_many(self, asked: dict[str, str]) -> str:
            if asked.get("Action") != "SetDesiredCapacity":
                return ""
            group, wanted = asked["AutoScalingGroupName"], int(asked["DesiredCapacity"])
            most = _found(group)["MaxSize"]
            said = f"New SetDesiredCapacity value {wanted} is above max value {most} for the AutoScalingGroup."
            error = f"<Error><Type>Sender</Type><Code>ValidationError</Code><Message>{said}</Message></Error>"
            return f"<ErrorResponse {_NAMESPACE}>{error}</ErrorResponse>" if wanted > most else ""

        def _theirs(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=30)
            connection.request(self.command, self.path, body or None, dict(self.headers))
            answer = connection.getresponse()
            found = answer.status, answer.read(), dict(answer.getheaders())
            connection.close()
            return found

        def log_message(self, *_: object) -> None: ...

    def _found(group: str) -> dict[str, Any]:
        client = boto3.client("autoscaling", region_name="us-east-1", endpoint_url=endpoint)
        (found,) = client.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"]
        return dict(found)

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # a scan asks for many things at once

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


_NAMESPACE = 'xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/"'
_UNKNOWN_TO_MOTO: dict[str, str] = {
    **{operation: str(answer) for (_, operation), answer in NOTHING.items()},
    "SimulatePrincipalPolicy": str(simulated()),
    "DescribeScalingActivities": f"""
<DescribeScalingActivitiesResponse {_NAMESPACE}><DescribeScalingActivitiesResult><Activities><member>
<ActivityId>1</ActivityId><StatusCode>Failed</StatusCode><StatusMessage>We currently do not have sufficient capacity
in the Availability Zone you requested (us-east-1a).</StatusMessage></member></Activities>
</DescribeScalingActivitiesResult></DescribeScalingActivitiesResponse>""",
}


def test_what_pulumi_does_not_know_of_is_found_by_its_tag_and_fails_down(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    ec2 = boto3.client("ec2", region_name="us-east-1")
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "gpuctl:cluster", "Value": account.cluster}]}]
    volume = ec2.create_volume(AvailabilityZone="us-east-1a", Size=730, VolumeType="gp3", TagSpecifications=tags)
    done = account.run("down", "-y", code=1)
    assert done.stdout == f"left: volume {volume['VolumeId']} in us-east-1, $0.08/h\n"
    assert done.stderr.splitlines()[-1] == "error: 1 thing could not be taken away; run `gpuctl down` again"
    ec2.delete_volume(VolumeId=volume["VolumeId"])
    again = account.run("down", "-y")
    assert f"there is no stack of {account.cluster}" in again.stderr
    assert again.stdout.splitlines()[0] == f"cluster {account.cluster} is down"


class Late:
    """An engine in whose cloud a network goes a while after its cards."""

    def __init__(self, kind: Failure, times: int) -> None:
        self.kind = kind
        self.times = times

    def destroy(self, *, force: bool = False) -> None:
        assert force
        self.times -= 1
        if self.times >= 0:
            raise StackFailed(self.kind, "aws:ec2/vpc:Vpc demo (delete) failed: DependencyViolation", "repeat it")

    def up(self, request: StackRequest, *, force: bool = False) -> dict[str, Any]:
        raise NotImplementedError

    def refresh(self, *, force: bool = False) -> None: ...

    def outputs(self) -> dict[str, Any]:
        return {}

    def resources(self) -> tuple[str, ...]:
        return ()


def _down(engine: Late, account: Account, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[float]]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", account.env["AWS_ENDPOINT_URL"])
    paused: list[float] = []
    rented = Rented(lambda _name: engine, lambda _line: None, pause=paused.append, now=lambda: 0.0)
    return rented.down(asked("aws", cluster=account.cluster, account=""), force=True), paused


def test_what_a_cloud_releases_late_is_tried_again(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _down(Late(Failure.RESOURCE, 2), account, monkeypatch) == ([], [10.0, 20.0])


@pytest.mark.parametrize(("kind", "times"), [(Failure.BUSY, 1), (Failure.CANCELLED, 1), (Failure.RESOURCE, 99)])
def test_nothing_else_is_and_not_for_ever(
    account: Account, monkeypatch: pytest.MonkeyPatch, kind: Failure, times: int
) -> None:
    engine = Late(kind, times)
    with pytest.raises(StackFailed):
        _down(engine, account, monkeypatch)
    assert times - engine.times == (6 if kind is Failure.RESOURCE else 1)


def test_down_with_credentials_of_another_account_proves_nothing(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    note = account.last_up_path()
    note.write_bytes(note.read_bytes().replace(b'"account":"123456789012"', b'"account":"999999999999"'))
    line = f"error: {account.cluster} is in account 999999999999, and these credentials are of 123456789012"
    assert account.run("down", "-y", code=2).stderr.startswith(line)
    assert account.machines()


def test_up_without_an_answer_rents_nothing(account: Account) -> None:
    done = account.run("up", "--provider", "aws", "--type", TYPE, code=2)
    assert done.stderr.splitlines()[-1] == "error: this costs money, and there is nobody to ask; add -y if it is wanted"
    assert not (account.folder / "state" / "clusters").exists()


def test_a_person_is_asked_once_the_price_is_known_and_sees_what_is_made(account: Account) -> None:
    account.boot_machines()
    code, shown = account.at_a_terminal("up", *account.up_flags, "--nodes", "1", typed="n\n")
    assert (code, shown.splitlines()[-1]) == (1, "error: nothing was rented; answer y, or add -y")
    assert not (account.folder / "state" / "clusters").exists()
    code, shown = account.at_a_terminal("up", *account.up_flags, "--nodes", "1", typed="y\n")
    assert code == 0, shown
    assert re.search(r" a day \(.*zones to try.*Rent them\? \[y/N\].*\d created", shown, re.S)
    account.run("down", "-y")


def test_what_the_account_may_not_have_is_not_begun(account: Account) -> None:
    account.vcpus.append(0)
    done = account.up(code=2)
    assert re.search(
        r"^error: quota: .* is 0: this account may start no g5.xlarge \(spot\); see https://", done.stderr, re.M
    )
    assert done.stderr.splitlines()[-1].startswith("error: aws would not give these machines; ")
    assert not (account.folder / "state" / "pulumi").exists()


def test_without_pulumi_nobody_is_asked(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(account.env, "PATH", str(account.folder))
    line = account.up(code=1).stderr.splitlines()[-1]
    assert line.startswith("error: Pulumi's CLI is not installed; install ")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--wait", "soon"], "error: --wait soon is not a number of minutes; use one such as 15"),
        (["--idle-minutes", "-1"], "error: --idle-minutes -1 is not a number of minutes; use one such as 15"),
        (["-o", "json"], "error: -o json prints the plan; add --dry-run"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(account: Account, args: list[str], line: str) -> None:
    assert account.up(*args, code=2).stderr.splitlines()[-1] == line
