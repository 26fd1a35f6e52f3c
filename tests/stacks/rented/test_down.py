"""``gpuctl down`` on AWS, whatever has become of the bucket, of Pulumi's state, or of the machine it was made on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest

from tests.fakes.aws.user import TYPE, Account
from tests.fakes.user import User
from tests.stacks.rented import interruptions, losses


@pytest.mark.slow
@pytest.mark.parametrize("lose", losses.ALL)
def test_machines_go_whatever_else_is_gone(account: Account, lose: Callable[[User], None]) -> None:
    losses.machines_go_all_the_same(account, lose)


@pytest.mark.slow
def test_after_a_damaged_state_the_cluster_comes_back(account: Account) -> None:
    account.boot_machines()
    account.up()
    losses.damaged_state(account)
    refused = account.up(code=1).stderr.splitlines()[-1]
    assert "cannot be read" in refused and f"{account.cluster}` removes the cluster by its tags" in refused
    assert len(account.machines()) == 2
    account.run("down", "-y")
    account.up()
    assert len(account.machines()) == 2
    account.run("down", "-y")


def _colleague(account: Account, folder: Path) -> dict[str, str]:
    """The same account and name, from a machine that knows nothing of the cluster."""
    return {**account.env, "GPUCTL_STATE_DIR": str(folder / "colleague")}


@pytest.mark.slow
def test_the_same_name_from_another_machine_is_refused(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.boot_machines()
    account.up()
    spec, machines = account.spec(), account.machines()
    url, mine = account.known().bucket, account.env
    monkeypatch.setattr(account, "env", _colleague(account, tmp_path))
    line = account.up(code=2, nodes="1").stderr.splitlines()[-1]
    assert line.startswith(f"error: cluster {account.cluster} already exists in us-east-1, made by {spec.owner} on ")
    assert "2 instances" in line and f"gpuctl attach {url.partition('?')[0]}" in line
    monkeypatch.setattr(account, "env", mine)
    assert account.spec() == spec and account.machines() == machines
    account.run("down", "-y")


@pytest.mark.slow
def test_who_attaches_uses_the_cluster_and_may_take_it_down(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.boot_machines()
    account.up()
    url, mine = account.known().bucket, account.env
    monkeypatch.setattr(account, "env", _colleague(account, tmp_path))
    said = account.run_alone("attach", url).stdout
    assert said.startswith(f"attached to cluster '{account.cluster}' of ") and "2 nodes live" in said
    assert all(f"{name} " in account.run("status").stdout for name in account.machines())
    line = account.up(code=2, nodes="3").stderr.splitlines()[-1]
    assert ", 2 nodes live, can be changed only where it was made; `gpuctl status --cluster" in line
    done = account.run("down", "-y")
    assert "removing resources by tag" in done.stderr
    assert account.run("leaks", "--provider", "aws").stdout == ""
    monkeypatch.setattr(account, "env", mine)
    account.run("down", "-y")  # whoever made it finds nothing any more, and forgets it


@pytest.mark.slow
def test_a_namesake_at_a_bucket_of_its_own_is_not_attached_by_a_guess(account: Account, tmp_path: Path) -> None:
    account.boot_machines()
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=f"team-{account.cluster}")
    account.up("--bucket", f"s3://team-{account.cluster}/runs", nodes="1")
    mine, account.env = account.env, _colleague(account, tmp_path)
    line = account.up(code=2).stderr.splitlines()[-1]
    assert f"cluster {account.cluster} already exists in us-east-1" in line
    assert "or use that one (gpuctl attach URL, that of its bucket), or remove it" in line
    account.env = mine
    account.run("down", "-y")


@pytest.mark.slow
def test_two_clusters_at_one_prefix_are_refused(account: Account) -> None:
    account.boot_machines()
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=f"team-{account.cluster}")
    shared = f"s3://team-{account.cluster}/gpuctl"
    account.up("--bucket", shared)
    spec, first = account.spec(), account.cluster
    account.cluster = f"{first}b"
    line = account.up("--bucket", shared, code=2).stderr.splitlines()[-1]
    assert f"cluster '{first}' of {spec.owner}" in line and "gpuctl attach" in line
    assert account.run("leaks", "--provider", "aws").stdout == "", "something was made before it was refused"
    account.cluster = first
    assert account.spec() == spec
    account.run("down", "-y")


@pytest.mark.slow
def test_a_laptop_that_is_gone_is_replaced_by_the_tag(account: Account, tmp_path: Path) -> None:
    account.boot_machines()
    account.up()
    shutil.rmtree(tmp_path / "state")
    by_tag = ("down", "--by-tag", account.cluster, "--provider", "aws", "--region", "us-east-1")
    asked = account.run_alone(*by_tag, code=2)
    assert asked.stderr.splitlines()[-1] == "error: nothing was deleted; answer y, or use -y"
    assert "auto scaling group" in asked.stdout and "total: 2 instances" in asked.stderr
    assert len(account.machines()) == 2
    done = account.run_alone(*by_tag, "-y")
    assert done.stdout.splitlines()[-1] == f"nothing of {account.cluster} is left on aws, in us-east-1"
    assert account.run("leaks", "--provider", "aws", "--region", "us-east-1").stdout == ""
    again = account.run_alone(*by_tag, "-y")
    assert again.stderr == f"nothing with the tag {account.cluster} on aws, in us-east-1\n"


@pytest.mark.slow
def test_two_of_one_name_are_told_apart_by_their_id(account: Account) -> None:
    account.boot_machines()
    account.up()
    ec2 = boto3.client("ec2", region_name="us-east-1")
    tags = [{"Key": "gpuctl:cluster", "Value": account.cluster}, {"Key": "gpuctl:id", "Value": "00000000ff"}]
    theirs = ec2.create_volume(
        AvailabilityZone="us-east-1a",
        Size=1,
        VolumeType="gp3",
        TagSpecifications=[{"ResourceType": "volume", "Tags": tags}],
    )["VolumeId"]
    by_tag = ("down", "--provider", "aws", "--region", "us-east-1", "-y", "--by-tag")
    line = account.run_alone(*by_tag, account.cluster, code=2).stderr.splitlines()[-1]
    assert line.startswith(f"error: there are 2 clusters named {account.cluster}: ") and "00000000ff" in line
    account.run_alone(*by_tag, account.spec().id)
    left = account.run("leaks", "--provider", "aws", code=1).stdout.splitlines()
    assert len(left) == 2 and theirs in left[1]
    account.run_alone(*by_tag, "00000000ff")
    assert account.run("leaks", "--provider", "aws").stdout == ""


@pytest.mark.slow
def test_ctrl_c_in_down_says_what_is_left_and_what_it_costs(account: Account) -> None:
    account.boot_machines()
    account.up()
    group = f"delete aws:autoscaling/group:Group {account.cluster}"
    account.obstacles.hold(group)
    with interruptions.started(account, "down", "-y") as process:
        account.obstacles.wait_until_held(group)
        process.send_signal(signal.SIGINT)
        account.obstacles.wait_until_cancelled()
        account.obstacles.release(group)
        said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 130
    assert said[-1].startswith(f"error: the removal of {account.cluster} was interrupted: remaining: ")
    assert "$" in said[-1]
    assert said[-1].endswith(f"/h; run `gpuctl down --cluster {account.cluster}` again to go on")
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws").stdout == ""


@pytest.mark.slow
def test_ctrl_c_while_machines_are_waited_for_says_what_they_cost(account: Account) -> None:
    """They run, and never tell of themselves."""
    with interruptions.started(account, "up", *account.up_flags, "--nodes", "1:2", "-y", "--wait", "5") as process:
        assert process.stderr is not None
        said = ""
        while "machines run" not in said or said.startswith("0 of"):
            said = process.stderr.readline()
            assert said, "it ended"
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert (
        "interrupted: remaining: 2 instances" in rest
        and f"/h; `gpuctl up --cluster {account.cluster}` continues" in rest
    )
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws").stdout == ""


@pytest.mark.slow
def test_an_up_that_finds_its_group_gone_offers_the_repair(account: Account) -> None:
    account.boot_machines()
    account.up()
    account.groups.delete_auto_scaling_group(
        AutoScalingGroupName=account.group()["AutoScalingGroupName"], ForceDelete=True
    )
    code, shown = account.at_a_terminal("up", typed="n\n")
    assert code == 1 and "The machines' group is gone. Repair the cluster? [y/N]" in shown
    account.run("up", "-y")
    assert len(account.machines()) == 2
    account.run("down", "-y")


@pytest.mark.slow
def test_an_up_that_changes_nothing_says_so(account: Account) -> None:
    account.boot_machines()
    account.up()
    assert account.run("up", "-y").stdout.splitlines()[0] == "no changes"
    assert "RESOURCES" in account.run("up", "--dry-run").stdout, "the table is there on request"
    assert TYPE in account.run("up", "--dry-run").stdout
    account.run("down", "-y")


@pytest.mark.slow
def test_what_may_not_be_looked_at_is_no_proof_that_it_is_gone(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    account.denied.add("DescribeVolumes")
    done = account.run("down", "-y", code=1)
    assert "left: could not check volumes in us-east-1" in done.stdout
    assert f"cluster {account.cluster} is down" not in done.stdout
    assert account.known().name == account.cluster, "a later down knows it still"
    account.denied.clear()
    assert f"cluster {account.cluster} is down" in account.run("down", "-y").stdout
