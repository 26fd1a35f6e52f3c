"""Taking down one cluster where another one is near: in its bucket, of its name, in another region or account."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state.clusters import KnownCluster
from tests.fakes.aws.user import Account

THEIRS = "00000000ff"


@pytest.fixture
def rented(account: Account) -> Iterator[Account]:
    """With one machine, at a bucket that the user's team has."""
    account.boot_machines()
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=f"team-{account.cluster}")
    account.up("--bucket", shared(account), nodes="1")
    yield account


def shared(account: Account) -> str:
    return f"s3://team-{account.cluster.removesuffix('-b')}/gpuctl"


def volume(account: Account, *, id_: str, region: str = "us-east-1") -> str:
    """Somebody else's, of the same cluster name."""
    tags = {"gpuctl:cluster": account.cluster, "gpuctl:id": id_, "gpuctl:owner": "kim@lab"}
    named = [{"Key": key, "Value": value} for key, value in tags.items() if value]
    made = boto3.client("ec2", region_name=region).create_volume(
        AvailabilityZone=f"{region}a",
        Size=1,
        VolumeType="gp3",
        TagSpecifications=[{"ResourceType": "volume", "Tags": named}],
    )
    return str(made["VolumeId"])


def is_there(volume_id: str) -> bool:
    found = boto3.client("ec2", region_name="us-east-1").describe_volumes()["Volumes"]
    return any(one["VolumeId"] == volume_id for one in found)


def note(account: Account) -> Path:
    return account.folder / "state" / "clusters" / f"{account.cluster}.json"


def changed(user: Account, **fields: Any) -> None:
    note(user).write_bytes(encode(msgspec.structs.replace(user.known(), **fields)))


@pytest.mark.slow
def test_an_up_that_was_refused_has_no_hold_on_the_others_bucket(rented: Account) -> None:
    spec, first = rented.spec(), rented.cluster
    rented.bucket().put("jobs/job-1/checkpoints/step", b"weights")
    rented.cluster = f"{first}-b"
    rented.up("--bucket", shared(rented), code=2)
    assert "no cluster named" in rented.run("down", "-y", code=2).stderr
    # As an older version noted it before it looked:
    known = KnownCluster(name=rented.cluster, provider="aws", bucket=shared(rented), id=THEIRS, region="us-east-1")
    note(rented).write_bytes(encode(known))
    line = rented.run("down", "-y", "--delete-checkpoints", rented.cluster, code=2).stderr.splitlines()[-1]
    assert f"holds cluster '{first}' of {spec.owner}" in line
    said = rented.run("down", "-y", "--force").stderr
    assert "nothing in it is changed" in said
    rented.cluster = first
    assert rented.spec() == spec
    assert rented.bucket().get("jobs/job-1/checkpoints/step") == b"weights"


@pytest.mark.slow
def test_a_prefix_below_another_clusters_is_refused_with_one_beside_it(rented: Account) -> None:
    first = rented.cluster
    below = f"{shared(rented)}/deeper/still"
    rented.cluster = f"{first}-b"
    line = rented.up("--bucket", below, code=2).stderr.splitlines()[-1]
    assert re.search(rf"{below}\S* is below {shared(rented)}\S*, which has cluster '{first}'", line)
    assert f"such as s3://team-{first}/{rented.cluster}" in line
    line = rented.up("--bucket", shared(rented), code=2).stderr.splitlines()[-1]
    assert f"such as s3://team-{first}/{rented.cluster}" in line


@pytest.mark.slow
def test_checkpoints_of_a_cluster_below_are_not_deleted(rented: Account) -> None:
    record = ClusterSpec(name="theirs", provider="aws", nodes_min=1, nodes_max=1, id=THEIRS)
    bucket = rented.bucket()
    bucket.put(f"theirs/{layout.CLUSTER}", encode(record))
    bucket.put("theirs/jobs/job-1/checkpoints/step", b"weights")
    done = rented.run("down", "-y", "--delete-checkpoints", rented.cluster, code=1)
    assert "the checkpoints were not deleted" in done.stderr and "theirs" in done.stderr.splitlines()[-1]
    assert bucket.get("theirs/jobs/job-1/checkpoints/step") == b"weights"


@pytest.mark.slow
def test_a_bucket_that_another_cluster_uses_stays(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    url = account.known().bucket
    record = ClusterSpec(name="theirs", provider="aws", nodes_min=1, nodes_max=1, id=THEIRS)
    theirs = open_bucket(url.replace(f"/{account.cluster}?", "/theirs?"))
    theirs.put(layout.CLUSTER, encode(record))
    account.bucket().put("jobs/job-1/checkpoints/step", b"weights")
    done = account.run("down", "-y", "--delete-checkpoints", account.cluster)
    assert "is kept: it is used by theirs (0 nodes live)" in done.stderr
    assert theirs.get(layout.CLUSTER) == encode(record)
    assert open_bucket(url).list("") == [], "its own part has gone"


@pytest.mark.slow
@pytest.mark.parametrize("region", ["us-east-1", "us-west-2"])
def test_without_its_state_a_cluster_that_runs_is_not_made_once_more(account: Account, region: str) -> None:
    account.boot_machines()
    account.up(nodes="1")
    (machine,) = account.machines()
    shutil.rmtree(account.last_up_path().parent / "state")
    line = account.up("--region", region, code=2, nodes="1").stderr.splitlines()[-1]
    assert f"Pulumi's state of {account.cluster} is gone; what is in us-east-1: 1 instance" in line
    assert account.machines() == [machine]
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws", "--all-regions").stdout == ""


@pytest.mark.slow
def test_who_attached_and_is_in_another_account_now_proves_nothing(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    shutil.rmtree(account.last_up_path().parent)
    changed(account, account="210987654321")
    line = account.run("down", "-y", code=2).stderr.splitlines()[-1]
    assert f"{account.cluster} is in account 210987654321, but these credentials are for" in line
    assert len(account.machines()) == 1 and note(account).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)  # all regions several times, on a server that is not AWS
def test_a_note_without_region_or_account_has_every_region_looked_into(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    shutil.rmtree(account.last_up_path().parent)
    changed(account, account="", region="")
    shutil.rmtree(account.folder / "state" / "regions.json", ignore_errors=True)
    account.env["AWS_REGION"] = "eu-west-1"
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws", "--all-regions").stdout == ""
    # Nothing at all, in an account that may be another one, is no proof:
    note(account).write_bytes(encode(KnownCluster(name=account.cluster, provider="aws", bucket="s3://gone/x", id="1")))
    line = account.run("down", "-y", code=1).stderr.splitlines()[-1]
    assert "its account was not recorded" in line
    account.run("down", "-y", "--force")


@pytest.mark.slow
def test_by_tag_in_the_wrong_region_takes_no_role_from_machines_that_run(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    wrong = ("down", "--by-tag", account.cluster, "--provider", "aws", "--region", "us-west-2", "-y")
    line = account.run_alone(*wrong, code=2).stderr.splitlines()[-1]
    assert line.startswith(
        "error: the cluster also has resources in us-east-1; add --region us-west-2 --region us-east-1"
    )
    roles = boto3.client("iam", region_name="us-east-1").list_roles()["Roles"]
    assert any(account.cluster in role["RoleName"] for role in roles)
    assert account.known().name == account.cluster


@pytest.mark.slow
def test_what_carries_another_id_is_named_and_left_and_keeps_nobody(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    theirs = volume(account, id_=THEIRS)
    done = account.run("down", "-y")
    assert f"not removed: volume {theirs}, of kim@lab's cluster {account.cluster} ({THEIRS})" in done.stderr
    assert f"cluster {account.cluster} is down" in done.stdout
    assert is_there(theirs) and not note(account).exists()


@pytest.mark.slow
def test_a_cluster_without_an_id_has_only_what_carries_none(account: Account) -> None:
    theirs, own = volume(account, id_=THEIRS), volume(account, id_="")
    note(account).parent.mkdir(parents=True)
    note(account).write_bytes(
        encode(KnownCluster(name=account.cluster, provider="aws", bucket="s3://gone/x", region="us-east-1"))
    )
    account.run("down", "-y")
    assert is_there(theirs) and not is_there(own)
    both = ("down", "--by-tag", account.cluster, "--provider", "aws", "--region", "us-east-1", "-y")
    own = volume(account, id_="")
    line = account.run_alone(*both, code=2).stderr.splitlines()[-1]
    assert f"there are 2 clusters named {account.cluster}" in line and "one without an id" in line
    assert is_there(theirs) and is_there(own)


def _damaged(account: Account) -> None:
    account.last_up_path().write_bytes(account.last_up_path().read_bytes()[:-30])


def _of_a_newer_version(account: Account) -> None:
    path = account.last_up_path()
    path.write_text(path.read_text().replace('"request":{', '"request":{"unheard_of":1,', 1))


def _note_damaged(account: Account) -> None:
    note(account).write_bytes(b"{")


def _note_lost(account: Account) -> None:
    note(account).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("harm", [_damaged, _of_a_newer_version, _note_damaged, _note_lost])
def test_a_record_on_this_machine_that_cannot_be_read_keeps_nothing_running(
    account: Account, harm: Callable[[Account], None]
) -> None:
    account.boot_machines()
    account.up(nodes="1")
    harm(account)
    if harm is not _damaged and harm is not _of_a_newer_version:
        line = account.run("up", "--provider", "local", code=2).stderr.splitlines()[-1]
        assert f"cluster {account.cluster} already exists, on provider aws" in line
    done = account.run("down", "-y")
    assert "is down" in done.stdout
    assert done.stderr.count("going on by the cluster's tags") == (harm in (_damaged, _of_a_newer_version))
    assert account.run("leaks", "--provider", "aws").stdout == ""
    assert last_request.find(account.cluster) is None


@pytest.mark.slow
def test_one_note_that_cannot_be_read_hides_no_other(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    (note(account).parent / "other.json").write_bytes(b"{")
    done = account.run_alone("leaks", "--provider", "aws", code=1)
    assert account.cluster in done.stdout


@pytest.mark.slow
def test_leaks_looks_where_an_attached_cluster_is(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    url = account.known().bucket
    shutil.rmtree(account.folder / "state")
    account.env["AWS_REGION"] = "eu-west-1"
    account.run_alone("attach", url)
    found = account.run("leaks", code=1)
    assert "instance" in found.stdout and "us-east-1" in found.stdout
    account.run("down", "-y")
    assert account.run("leaks", "--provider", "aws", "--all-regions").stdout == ""


@pytest.mark.slow
def test_while_machines_cannot_be_listed_nothing_they_need_is_taken(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    shutil.rmtree(account.last_up_path().parent / "state")
    account.denied |= {"DescribeInstances", "DescribeAutoScalingGroups"}
    done = account.run("down", "-y", code=1)
    assert "only machines are removed by tag, because others may be left that cannot be listed" in done.stderr
    assert "left: could not check instances in us-east-1" in done.stdout
    account.denied.clear()
    assert len(account.machines()) == 1
    account.run("down", "-y")


@pytest.mark.parametrize(
    ("name", "provider", "said"),
    [
        ("../../pwned", "aws", "is not a name"),
        ("\x1b[2J", "aws", "the name of the cluster there ?[2J is not a name"),
        ("fine", "awss", "unknown provider 'awss'"),
    ],
)
def test_what_somebody_else_wrote_is_looked_at_before_it_is_used(
    tmp_path: Path, account: Account, name: str, provider: str, said: str
) -> None:
    url = f"file://{tmp_path}/theirs"
    spec = ClusterSpec(name=name, provider=provider, nodes_min=1, nodes_max=1, id=THEIRS, owner="\x1b[31mkim")
    open_bucket(url).put(layout.CLUSTER, encode(spec))
    line = account.run_alone("attach", url, code=2).stderr.splitlines()[-1]
    assert said in line
    assert not list(tmp_path.rglob("pwned*"))


@pytest.mark.slow
def test_attach_sees_a_cluster_whose_note_is_lost(tmp_path: Path, account: Account) -> None:
    """Else ``down`` would take that one for the one that was attached."""
    account.boot_machines()
    account.up(nodes="1")
    note(account).unlink()
    url = f"file://{tmp_path}/theirs"
    spec = ClusterSpec(name=account.cluster, provider="aws", nodes_min=1, nodes_max=1, id=THEIRS)
    open_bucket(url).put(layout.CLUSTER, encode(spec))
    assert "another cluster named" in account.run_alone("attach", url, code=2).stderr
    account.run("down", "-y")


def test_flags_that_by_tag_does_not_know_are_refused(account: Account) -> None:
    by_tag = ("down", "--by-tag", "x", "--provider", "aws")
    for more in (["--delete-checkpoints", "x"], ["--cluster", "x"], ["--force"]):
        line = account.run_alone(*by_tag, *more, code=2).stderr.splitlines()[-1]
        assert line.startswith(f"error: {more[0]} does not go with --by-tag")


@pytest.mark.slow
def test_after_a_removal_by_tag_the_name_is_free_for_everybody(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    account.run_alone("down", "--by-tag", account.cluster, "--provider", "aws", "--region", "us-east-1", "-y")
    shutil.rmtree(account.folder / "state", ignore_errors=True)
    account.up(nodes="1")
    account.run("down", "-y")


@pytest.mark.slow
def test_by_tag_leaves_a_role_while_other_regions_cannot_be_looked_into(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    account.denied.add("DescribeRegions")
    wrong = ("down", "--by-tag", account.cluster, "--provider", "aws", "--region", "us-west-2", "-y")
    done = account.run_alone(*wrong, code=1)
    assert "looking in all regions for machines that need its roles" in done.stderr
    assert "left: could not check other regions" in done.stdout
    account.denied.clear()
    roles = boto3.client("iam", region_name="us-east-1").list_roles()["Roles"]
    assert any(account.cluster in role["RoleName"] for role in roles)
    account.run("down", "-y")


@pytest.mark.slow
def test_by_tag_that_finds_nothing_forgets_nothing(account: Account) -> None:
    note(account).parent.mkdir(parents=True)
    note(account).write_bytes(b"{")
    done = account.run_alone("down", "--by-tag", account.cluster, "--provider", "aws", "--region", "us-east-1", "-y")
    assert f"nothing with the tag {account.cluster} on aws, in us-east-1" in done.stderr
    assert note(account).read_bytes() == b"{"


@pytest.mark.slow
def test_who_attached_makes_nothing_of_it_in_another_account(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    shutil.rmtree(account.last_up_path().parent)
    changed(account, account="210987654321")
    line = account.up(nodes="2", code=2).stderr.splitlines()[-1]
    assert f"{account.cluster} is in account 210987654321, but these credentials are for" in line
    assert account.known().account == "210987654321"
    # To attach again tells what the record has:
    account.run_alone("attach", account.known().bucket)
    assert account.known().account == account.spec().account != ""
    account.run("down", "-y")


@pytest.mark.slow
def test_a_right_that_is_missing_is_not_waited_for(account: Account) -> None:
    account.boot_machines()
    account.up(nodes="1")
    account.obstacles.refuse(f"delete aws:iam/instanceProfile:InstanceProfile {account.cluster}", "AccessDenied: no")
    done = account.run("down", "-y")
    assert "trying again in" not in done.stderr
    assert "removing resources by tag" in done.stderr
