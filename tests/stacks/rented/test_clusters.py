"""``up``, ``repair`` and ``down`` of a rented cluster by the real command line: the real engine and programs, with a
program that stands in for Pulumi's CLI (``pulumi_cli``) where there is no real one, and a moto server for AWS
(``amazon``). The test plays the machines: it says with a heartbeat that a machine has become a node.
"""

from __future__ import annotations

import re
import signal
import stat
import time
from collections.abc import Callable
from typing import Any

import boto3
import psutil
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.errors import StoreError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.jobs.queue import JobRequest
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.engine.deployment import InterruptedCreation, StateResource
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.rented.clusters import RentedClusters
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest
from tests.fakes.aws.user import TYPE, Account
from tests.fakes.requests import asked
from tests.fakes.user import User
from tests.stacks.rented import interruptions, two_users
from tests.waiting import until


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

    line = "error: machines of aws cannot be preempted on demand; try it on --provider local\n"
    assert account.run("preempt", account.machines()[0], code=2).stderr == line
    done = account.run("down", "-y", "--delete-checkpoints", "other", code=2)
    assert (
        done.stderr == f"error: --delete-checkpoints other does not match cluster {account.cluster}; repeat its name\n"
    )
    assert len(account.machines()) == 2
    bucket.put("jobs/a-1/checkpoints/part", b"kept")
    done = account.run("down", "-y")
    assert done.stdout.splitlines()[0] == f"cluster {account.cluster} is down"
    assert f"kept Bucket {account.cluster}\n" in done.stderr and "deleted Bucket " not in done.stderr
    assert account.run("leaks", "--provider", "aws").stdout == ""
    assert [entry.key for entry in bucket.list("")] == ["jobs/a-1/checkpoints/part", "past.json"]
    assert account.run("status", code=2).stderr.startswith(f"error: no cluster named '{account.cluster}'")


@pytest.mark.slow
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
    assert account.run("repair", "-y").stdout == f"cluster {account.cluster} is complete\n"
    assert len(account.machines()) == 3

    url = account.known().bucket
    account.run("down", "-y")
    account.up(nodes="1")
    assert account.known().bucket == url
    account.run("down", "-y", "--delete-checkpoints", account.cluster)
    with pytest.raises(StoreError, match="there is no bucket"):  # though its tag has the first one's identity
        open_bucket(url).list("")


@pytest.mark.slow
def test_machines_that_cannot_boot_are_named_with_their_reason(account: Account) -> None:
    account.boot_machines(lambda _name: False)
    done = account.up(code=1)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"error: i-\w+ could not boot: driver: nvidia-smi finds no GPU; "
        rf"see gpuctl logs --cluster {account.cluster} --boot i-\w+ "
        r"\(remaining: 2 instances, 1 VPC, 1 VPC endpoint and \d+ more, \$2\.01/h; "
        rf"`gpuctl down --cluster {account.cluster}` removes it\)",
        last,
    )
    log = account.run("logs", "--boot", re.findall(r"i-\w+", last)[0])
    assert "failed" in log.stderr
    account.run("down", "-y")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_zone_without_machines_is_cleared_and_the_next_one_is_tried(account: Account) -> None:
    account.boot_machines()
    account.without.append("us-east-1a")
    said = account.up("--wait", "0.01").stderr
    assert "zones to try: us-east-1a, us-east-1b" in said
    assert "0 of 2 machines started within 0.01 minutes: We currently do not have sufficient capacity" in said
    assert "giving up us-east-1a, next is us-east-1b" in said and "us-east-1a is cleaned up" in said
    assert account.group()["AvailabilityZones"] == ["us-east-1b"]
    account.run("down", "-y")


@pytest.mark.slow
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
    assert "which zone has capacity (us-east-1a stands for it)" in done.stderr
    assert account.group()["AvailabilityZones"] == ["us-east-1b"]
    account.run("down", "-y")


@pytest.mark.slow
def test_what_is_not_said_again_stays_as_it_was(account: Account) -> None:
    account.boot_machines()
    account.up("--zone", "us-east-1c", "--on-demand", "--idle-minutes", "60", nodes="1:2")
    (first, second) = account.machines()
    again = account.run("up", "-y", "--nodes", "1:3")
    assert again.stdout.startswith("nodes: 1:2 -> 1:3\ntotal: $"), "what changes, and not the whole plan again"
    assert "zones to try" not in again.stderr
    assert {first, second} < set(account.machines()) and len(account.machines()) == 3
    assert account.group()["AvailabilityZones"] == ["us-east-1c"]
    spec = account.spec()
    assert (spec.idle_minutes, spec.stall_minutes) == (60, 30)
    account.run("up", "-y", "--stall-minutes", "5")
    spec = account.spec()
    assert (spec.idle_minutes, spec.stall_minutes, spec.nodes_min, spec.nodes_max) == (60, 5, 1, 3)

    refused = account.run("up", "--type", "g5.2xlarge", code=2).stderr.splitlines()[-1]  # before anybody is asked
    hint = f"run `gpuctl down --cluster {account.cluster}` first, or choose another name with --cluster"
    assert refused == f"error: {account.cluster} has machines of {TYPE}, not g5.2xlarge; {hint}"
    assert len(account.machines()) == 3
    other = account.run("up", "--provider", "local", code=2).stderr
    line = f"cluster {account.cluster} already exists, on provider aws"
    hint = f"choose another name with --cluster, or run `gpuctl down --cluster {account.cluster}` first"
    assert other == f"error: {line}; {hint}\n"
    assert account.known().provider == "aws"

    group = account.group()["AutoScalingGroupName"]
    account.groups.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=0)  # as if all had been idle
    assert "zones to try" not in account.run("up", "-y").stderr
    assert (account.group()["AvailabilityZones"], len(account.machines())) == (["us-east-1c"], 3)
    account.run("down", "-y")


@pytest.mark.slow
def test_what_pulumi_does_not_know_of_is_found_by_its_tag_and_fails_down(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    ec2 = boto3.client("ec2", region_name="us-east-1")
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "gpuctl:cluster", "Value": account.cluster}]}]
    volume = ec2.create_volume(AvailabilityZone="us-east-1a", Size=730, VolumeType="gp3", TagSpecifications=tags)
    done = account.run("down", "-y", code=1)
    assert done.stdout == f"left: volume {volume['VolumeId']} in us-east-1, $0.08/h\n"
    elsewhere = f"gpuctl down --by-tag {account.cluster} --provider aws --region us-east-1"
    hint = f"run `gpuctl down --cluster {account.cluster}` again"
    line = f"1 thing could not be removed; {hint}, or remove whatever has its name"
    assert done.stderr.splitlines()[-1] == f"error: {line}: {elsewhere}"
    ec2.delete_volume(VolumeId=volume["VolumeId"])
    again = account.run("down", "-y")
    assert f"there is no stack of {account.cluster}" in again.stderr
    assert again.stdout.splitlines()[0] == f"cluster {account.cluster} is down"


class Late:
    """An engine in whose cloud a network goes a while after its cards."""

    def __init__(self, kind: FailureKind, times: int) -> None:
        self.kind = kind
        self.times = times
        self.forgotten = False

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

    def resources(self) -> tuple[StateResource, ...]:
        return ()

    def unknown(self, *, force: bool = False) -> tuple[InterruptedCreation, ...]:  # noqa: ARG002
        return ()

    def forget_unknown(self, *, force: bool = False) -> None: ...

    def orphaned_plugins(self) -> list[psutil.Process]:
        return []

    def forget(self) -> None:
        self.forgotten = True


def _down(engine: Late, account: Account, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[float]]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", account.env["AWS_ENDPOINT_URL"])
    paused: list[float] = []
    rented = RentedClusters(lambda _name: engine, lambda _line: None, pause=paused.append, now=lambda: 0.0)
    return rented.down(asked("aws", cluster=account.cluster, account=""), force=True), paused


@pytest.mark.slow
def test_what_a_cloud_releases_late_is_tried_again(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _down(Late(FailureKind.RESOURCE, 2), account, monkeypatch) == ([], [10.0, 20.0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FailureKind.BUSY, FailureKind.HELD, FailureKind.CANCELLED])
def test_what_somebody_else_is_at_is_not_taken_away(
    account: Account, monkeypatch: pytest.MonkeyPatch, kind: FailureKind
) -> None:
    engine = Late(kind, 1)
    with pytest.raises(StackFailed):
        _down(engine, account, monkeypatch)
    assert engine.times == 0 and not engine.forgotten


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [FailureKind.RESOURCE, FailureKind.UNREADABLE, FailureKind.NO_CLI, FailureKind.NO_PLUGIN, FailureKind.OTHER]
)
def test_a_state_that_is_of_no_use_is_forgotten_once_nothing_is_there(
    account: Account, monkeypatch: pytest.MonkeyPatch, kind: FailureKind
) -> None:
    engine = Late(kind, 99)
    assert _down(engine, account, monkeypatch)[0] == []
    assert engine.forgotten


@pytest.mark.slow
def test_records_that_cannot_be_deleted_do_not_fail_a_down(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", account.env["AWS_ENDPOINT_URL"])
    note = account.folder / "state" / "clusters" / f"{account.cluster}.json"
    note.mkdir(parents=True)
    (account.last_up_path().parent / "state").mkdir(parents=True)
    said: list[str] = []
    rented = RentedClusters(lambda _name: Late(FailureKind.RESOURCE, 0), said.append)
    assert rented.down(asked("aws", cluster=account.cluster, account=""), force=True) == []
    assert said[-1] == f"everything is removed, but {note} cannot be deleted: Is a directory"
    assert not account.last_up_path().parent.exists(), "the stack's folder stays"


@pytest.mark.slow
def test_ctrl_c_while_a_repair_looks_at_the_cloud_says_what_is_there(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refreshing(Late):
        def refresh(self, **_: bool) -> None:
            raise KeyboardInterrupt

    monkeypatch.setenv("AWS_ENDPOINT_URL", account.env["AWS_ENDPOINT_URL"])
    last = LastRequest(request=asked("aws", cluster=account.cluster, account=""), terms=NodeOptions())
    last_request.remember(last)
    said, questions = list[str](), list[str]()
    rented = RentedClusters(lambda _name: Refreshing(FailureKind.RESOURCE, 0), said.append)
    with pytest.raises(KeyboardInterrupt):
        rented.repair(last, wait_s=1.0, confirm=questions.append)
    assert questions == ["Replace what is missing?"]
    assert said[-1].startswith("interrupted: nothing remains; `gpuctl up --cluster ")


@pytest.mark.slow
def test_down_with_credentials_of_another_account_proves_nothing(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    note = account.last_up_path()
    note.write_bytes(note.read_bytes().replace(b'"account":"123456789012"', b'"account":"999999999999"'))
    line = f"error: {account.cluster} is in account 999999999999, but these credentials are for 123456789012"
    assert account.run("down", "-y", code=2).stderr.startswith(line)
    assert account.machines()


@pytest.mark.slow
def test_up_without_an_answer_rents_nothing(account: Account) -> None:
    done = account.run("up", "--provider", "aws", "--type", TYPE, code=2)
    assert (
        done.stderr.splitlines()[-1]
        == "error: this costs money and needs confirmation, but there is no terminal; add -y to confirm"
    )
    assert not (account.folder / "state" / "clusters").exists()


@pytest.mark.slow
def test_a_person_is_asked_once_the_price_is_known_and_sees_what_is_made(account: Account) -> None:
    account.boot_machines()
    code, shown = account.at_a_terminal("up", *account.up_flags, "--nodes", "1", typed="n\n")
    assert (code, shown.splitlines()[-1]) == (1, "error: nothing was rented; answer y, or use -y")
    assert not (account.folder / "state" / "clusters").exists()
    code, shown = account.at_a_terminal("up", *account.up_flags, "--nodes", "1", typed="y\n")
    assert code == 0, shown
    assert re.search(r" a day \(.*zones to try.*Rent them\? \[y/N\].*\d created", shown, re.S)
    account.run("down", "-y")


@pytest.mark.slow
def test_what_the_account_may_not_have_is_not_begun(account: Account) -> None:
    account.vcpus.append(0)
    done = account.up(code=2)
    assert re.search(
        r"^error: quota: .* is 0: this account may not start any g5.xlarge \(spot\); see https://", done.stderr, re.M
    )
    assert done.stderr.splitlines()[-1].startswith("error: aws would refuse these machines; ")
    assert not (account.folder / "state" / "pulumi").exists()
    account.boot_machines()
    assert "warning: quota: " in account.up("--skip-check", "quota,network limits").stderr


@pytest.mark.slow
def test_without_pulumi_nobody_is_asked(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(account.env, "PATH", str(account.folder))
    line = account.run("up", *account.up_flags, "--nodes", "2", code=1).stderr.splitlines()[-1]
    assert line.startswith("error: Pulumi's CLI is not installed; add -y to have Pulumi ")


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("way", "goes_on"), interruptions.every_way("aws"))
def test_up_that_broke_off_at_any_resource_leaves_nothing(
    account: Account, way: interruptions.Way | None, goes_on: bool
) -> None:
    """With the flagship's private network, its endpoint for SSH and its placement group."""
    key = account.folder / ".ssh" / "id_ed25519.pub"
    flags = ("--type", "p4d.24xlarge", "--ssh-key", str(key), "--ssh-from", "203.0.113.7/32", "--zone", "us-east-1a")
    account.up_flags = ["--provider", "aws", *flags]
    account.boot_machines()
    interruptions.at_every_resource(account, way, goes_on=goes_on)


@pytest.mark.parametrize("way", interruptions.A_FEW)
def test_up_that_broke_off_at_its_role_leaves_nothing(account: Account, way: Callable[[User, str], None]) -> None:
    interruptions.at_one(account, way, f"create aws:iam/role:Role {account.cluster}")


@pytest.mark.slow
@pytest.mark.parametrize("way", interruptions.WAYS)
def test_up_that_broke_off_at_its_group_goes_on(account: Account, way: Callable[[User, str], None]) -> None:
    account.boot_machines()
    group = f"create aws:autoscaling/group:Group {account.cluster}"
    way(account, group)
    account.obstacles.forget()
    goes_on = f"goes on with what an earlier `gpuctl up --cluster {account.cluster}` began"
    assert account.up().stdout.splitlines()[0] == goes_on, "though nothing of the request changes"
    assert len(account.machines()) == 2
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws").stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(600)  # all regions, on a server that is not AWS
def test_up_in_another_region_leaves_nothing_of_the_one_that_broke_off(account: Account) -> None:
    account.up_flags = ["--provider", "aws", "--type", "p4d.24xlarge"]
    account.boot_machines()
    interruptions.killed(account, f"create aws:ec2/natGateway:NatGateway {account.cluster}-nat")
    account.obstacles.forget()
    account.groups = boto3.client("autoscaling", region_name="us-west-2")
    account.up("--region", "us-west-2")
    assert len(account.machines()) == 2
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws", "--all-regions").stdout == ""


@pytest.mark.slow
def test_a_policy_that_no_state_knows_keeps_no_role(account: Account) -> None:
    account.boot_machines()
    interruptions.killed(account, f"create aws:iam/rolePolicy:RolePolicy {account.cluster}")
    account.obstacles.forget()
    assert "trying again" not in account.run("down", "-y").stderr
    assert account.run("leaks", "--provider", "aws").stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["vpc/securityGroupIngressRule:SecurityGroupIngressRule", "ec2/keyPair:KeyPair"])
def test_what_broke_off_beside_machines_is_made_again_and_they_run_on(account: Account, what: str) -> None:
    (account.folder / ".ssh" / "id_ed25519.pub").rename(account.folder / "key.pub")
    account.boot_machines()
    account.up()
    machines, rules = account.machines(), len(account.rules())
    key = str(account.folder / "key.pub")
    account.up_flags = [*account.up_flags, "--ssh-from", "203.0.113.7/32", "--ssh-key", key]
    name = f"{account.cluster}-ssh" if "Rule" in what else account.cluster
    interruptions.killed(account, f"create aws:{what} {name}")
    account.obstacles.forget()
    account.up()
    assert account.machines() == machines
    assert len(account.rules()) == rules + 1
    account.run("down", "-y")


@pytest.mark.slow
def test_up_tests_a_new_fabric_by_itself(account: Account) -> None:
    """The machines here run nothing, so it is left as a person would leave it."""
    account.up_flags = ["--provider", "aws", "--type", "p4d.24xlarge"]
    account.boot_machines()
    with interruptions.started(account, "up", *account.up_flags, "--nodes", "2", "-y") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("testing the devices and the network between the nodes"):
                break
        else:
            pytest.fail("".join(said))
        job = until(lambda: queue.newest(account.bucket()), "the test's job")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    queue.end_as_cancelled(account.bucket(), job, "no agent does it")
    account.run("down", "-y")


@pytest.mark.slow
def test_the_largest_machines_come_with_all_that_they_need_and_go_with_it(account: Account) -> None:
    """Private addresses, a NAT gateway, an endpoint for SSH, machines side by side."""
    account.boot_machines()
    key = account.folder / "key.pub"
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHk5qPcZ7X4fVQm8iT2Zb0QJkq8b1Nq1zQ2u1cE3n0wq me@laptop\n")
    flags = ("--type", "p4d.24xlarge", "--ssh-key", str(key), "--ssh-from", "203.0.113.7/32", "--zone", "us-east-1a")
    account.run("up", "--provider", "aws", *flags, "--nodes", "1", "-y")
    found = account.run("leaks", "--provider", "aws", code=1).stdout
    kinds = ("NAT gateway", "elastic IP", "instance connect endpoint", "placement group", "VPC endpoint", "key pair")
    assert [kind for kind in kinds if kind not in found] == []
    made = {operation.split()[1] for operation in account.obstacles.done()}
    assert made == {one["type"] for one in account.deployment()["resources"] if one["custom"]} - {
        "pulumi:providers:aws"
    }
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws").stdout == ""


@pytest.mark.slow
def test_a_second_user_changes_nothing_of_what_the_first_has_left(account: Account) -> None:
    two_users.a_second_user_changes_nothing(account)


@pytest.mark.slow
def test_in_another_region_it_goes_on_with_its_jobs_and_checkpoints(account: Account) -> None:
    account.boot_machines()
    account.without.append("us-east-1a")
    account.up("--wait", "0.01", "--zone", "us-east-1a", code=1, nodes="1")
    url, bucket = account.known().bucket, account.bucket()
    bucket.put("jobs/a-1/checkpoints/part", b"weights")
    job = queue.submit(bucket, account.spec(), JobRequest(script="train.py")).job
    refused = account.up("--bucket", "s3://other/place", code=2).stderr.splitlines()[-1]
    assert f"{job} at s3://" in refused and "would be out of reach; leave --bucket out" in refused
    account.groups = boto3.client("autoscaling", region_name="us-west-2")
    done = account.up("--region", "us-west-2", nodes="1")
    assert f"bucket: {url.partition('?')[0]} stays in us-east-1" in done.stderr
    assert account.known().bucket == url and account.known().region == "us-west-2"
    assert bucket.get("jobs/a-1/checkpoints/part") == b"weights" and account.spec().region == "us-west-2"
    account.run("down", "-y")


@pytest.mark.slow
def test_it_comes_back_after_a_colleague_has_removed_it(account: Account) -> None:
    two_users.it_comes_back_after_a_colleague_has_removed_it(account)


@pytest.mark.slow
def test_a_stale_note_makes_nothing_beside_a_namesake(account: Account) -> None:
    two_users.a_stale_note_makes_nothing_beside_a_namesake(account)


@pytest.mark.slow
def test_who_has_no_key_gets_one_that_ssh_is_told_of(account: Account) -> None:
    account.boot_machines()
    (account.folder / ".ssh" / "id_ed25519.pub").unlink()
    account.up("--ssh-from", "203.0.113.7/32", nodes="1")
    own = account.folder / "state" / "ssh" / "id_ed25519"
    key = own.with_suffix(".pub").read_text().strip()
    assert stat.S_IMODE(own.stat().st_mode) == 0o600 and account.last_up()["ssh_key"] == key
    assert f'IdentityFile "{own}"' in (own.parent / f"{account.cluster}.conf").read_text()
    account.up(nodes="1:2")
    assert account.last_up()["ssh_key"] == key == account.declared("KeyPair")["publicKey"]
    assert f'IdentityFile "{own}"' in (own.parent / f"{account.cluster}.conf").read_text()
    account.run("down", "-y")
    assert own.is_file()
