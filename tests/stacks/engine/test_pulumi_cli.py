"""The stand-in for Pulumi's CLI (the real one, where it is on PATH), by the Automation API: what it leaves when it is
cancelled or killed, and what it refuses."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pulumi
import pytest
from pulumi.automation import CommandError, LocalWorkspace, ProjectSettings, Stack, StackNotFoundError

from tests.fakes import user
from tests.fakes.aws.api import amazon
from tests.fakes.pulumi import obstacles
from tests.fakes.pulumi.obstacles import Obstacles

VPC = "create aws:ec2/vpc:Vpc demo"
GATEWAY = "create aws:ec2/internetGateway:InternetGateway demo"
TAGS = {"gpuctl:cluster": "demo"}


def program() -> None:
    provider = pulumi.ProviderResource("aws", "demo", {"region": "us-east-1"})
    there = pulumi.ResourceOptions(provider=provider)
    network = pulumi.CustomResource("aws:ec2/vpc:Vpc", "demo", {"cidrBlock": "10.77.0.0/16", "tags": TAGS}, there)
    pulumi.CustomResource("aws:ec2/internetGateway:InternetGateway", "demo", {"vpcId": network.id, "tags": TAGS}, there)
    pulumi.export("network", network.id)


class Place:
    """A project with one stack, whose plug-in a test can hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.obstacles = Obstacles(folder / "obstacles")
        (folder / "state").mkdir()

    def stack(self, passphrase: str = "right") -> Stack:
        return Stack.create_or_select("demo", self._workspace(passphrase))

    def select(self) -> Stack:
        return Stack.select("demo", self._workspace("right"))

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.state_path().read_text())["checkpoint"]["latest"])

    def state_path(self) -> Path:
        return self.folder / "state" / ".pulumi" / "stacks" / "gpuctl" / "demo.json"

    def pending(self) -> list[str]:
        return [f"{one['type']} {one['resource']['type']}" for one in self.state().get("pending_operations") or []]

    def known(self) -> set[str]:
        """What the state has, but for providers and the stack."""
        there = [one["type"] for one in self.state().get("resources") or []]
        return {kind for kind in there if not kind.startswith("pulumi:")}

    def locks(self) -> list[Path]:
        return sorted((self.folder / "state" / ".pulumi" / "locks").rglob("*.json"))

    def engine(self) -> int:
        """Who holds the lock."""
        (lock,) = self.locks()
        return int(json.loads(lock.read_text())["pid"])

    def _workspace(self, passphrase: str) -> LocalWorkspace:
        return LocalWorkspace(
            work_dir=str(self.folder),
            program=program,
            env_vars={
                "PULUMI_BACKEND_URL": f"file://{self.folder / 'state'}",
                "PULUMI_CONFIG_PASSPHRASE": passphrase,
                "PULUMI_SKIP_UPDATE_CHECK": "true",
            },
            secrets_provider="passphrase",
            project_settings=ProjectSettings(name="gpuctl", runtime="python", main=str(self.folder)),
        )


@pytest.fixture
def place(aws_account: None, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    del aws_account
    with amazon(s3_endpoint, [], [384]) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("PULUMI_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PATH", f"{user.installed(tmp_path / 'bin')}:{os.environ['PATH']}")
        monkeypatch.setenv(obstacles.FOLDER, str(tmp_path / "obstacles"))
        place = Place(tmp_path)
        yield place
        _nothing_left()
    # Pulumi's SDK leaves the program of a broken off update suspended. Freed in the middle of a later ast.parse, which
    # is not reentrant in CPython 3.11, it would make that one fail.
    gc.collect()


def _networks() -> list[str]:
    ec2 = boto3.client("ec2", region_name="us-east-1")
    ours = [{"Name": "tag:gpuctl:cluster", "Values": ["demo"]}]
    return [one["VpcId"] for one in ec2.describe_vpcs(Filters=ours)["Vpcs"]]


def _nothing_left() -> None:
    """For the test after this one: they share an account."""
    ec2 = boto3.client("ec2", region_name="us-east-1")
    for network in _networks():
        attached = [{"Name": "attachment.vpc-id", "Values": [network]}]
        for one in ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]:
            ec2.detach_internet_gateway(InternetGatewayId=one["InternetGatewayId"], VpcId=network)
            ec2.delete_internet_gateway(InternetGatewayId=one["InternetGatewayId"])
        ec2.delete_vpc(VpcId=network)


def _while_held(place: Place, operation: str, act: Callable[[], None], verb: str = "up") -> str:
    """What the CLI wrote, where ``act`` was done while the plug-in was at ``operation``; empty: it did not fail."""
    stack = place.stack()
    place.obstacles.hold(operation)
    told: list[str] = []

    def run() -> None:
        try:
            getattr(stack, verb)(color="never")
            told.append("")
        except CommandError as error:
            told.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    place.obstacles.wait_until_held(operation)
    act()
    thread.join(60)
    return told[0]


def _send(place: Place, number: int) -> None:
    os.kill(place.engine(), number)


@pytest.mark.slow
def test_what_is_made_is_known_and_goes_again(place: Place) -> None:
    done = place.stack().up(color="never")
    assert [done.outputs["network"].value] == _networks()
    assert place.known() == {"aws:ec2/vpc:Vpc", "aws:ec2/internetGateway:InternetGateway"}
    assert place.obstacles.done() == [VPC, GATEWAY]
    assert not place.locks()
    place.stack().destroy(color="never", remove=True)
    assert not _networks()
    with pytest.raises(StackNotFoundError):
        place.select()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["killed", "hung up"])
def test_a_killed_engine_leaves_its_lock_and_its_plugin_goes_on(place: Place, number: int) -> None:
    said = _while_held(place, VPC, lambda: _send(place, number))
    assert said
    place.obstacles.release(VPC)
    place.obstacles.wait_until_ended(VPC)
    assert len(_networks()) == 1
    assert (place.pending(), place.known()) == (["creating aws:ec2/vpc:Vpc"], set())
    with pytest.raises(CommandError, match="the stack is currently locked by 1 lock") as caught:
        place.stack().up(color="never")
    assert f"(pid {place.engine()}) at 2" in str(caught.value)
    place.stack().cancel()
    assert not place.locks()
    place.stack().up(color="never")
    assert len(_networks()) == 2
    assert place.pending() == ["creating aws:ec2/vpc:Vpc"], "nobody but a person can know what became of it"
    place.stack().refresh(color="never", clear_pending_creates=True)
    assert place.pending() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_under_way_is_finished_when_it_is_cancelled(place: Place, number: int) -> None:
    def cancel() -> None:
        _send(place, number)
        place.obstacles.release(VPC)

    said = _while_held(place, VPC, cancel)
    assert "update canceled" in said
    assert (place.known(), place.pending(), place.locks()) == ({"aws:ec2/vpc:Vpc"}, [], [])
    assert place.obstacles.done() == [VPC]


def test_cancelled_twice_it_ends_at_once(place: Place) -> None:
    def cancel() -> None:
        engine = place.engine()
        os.kill(engine, signal.SIGINT)
        place.obstacles.wait_until_cancelled()
        os.kill(engine, signal.SIGINT)

    said = _while_held(place, VPC, cancel)
    assert "update cancelled" in said
    assert (place.known(), place.pending(), place.locks()) == (set(), ["creating aws:ec2/vpc:Vpc"], [])
    assert not _networks()


@pytest.mark.slow
def test_a_cancelled_destroy_ends_well_and_the_stack_stays(place: Place) -> None:
    place.stack().up(color="never")
    delete = GATEWAY.replace("create", "delete")

    def cancel() -> None:
        _send(place, signal.SIGINT)
        place.obstacles.wait_until_cancelled()
        place.obstacles.release(delete)

    assert _while_held(place, delete, cancel, "destroy") == ""
    assert place.known() == {"aws:ec2/vpc:Vpc"}
    with pytest.raises(CommandError, match="still has resources; removal rejected"):
        place.stack().workspace.remove_stack("demo")


@pytest.mark.slow
def test_what_the_cloud_refuses_is_told_and_the_rest_stays(place: Place) -> None:
    place.obstacles.refuse(GATEWAY, "InternetGatewayLimitExceeded: the maximum has been reached")
    with pytest.raises(CommandError, match="InternetGatewayLimitExceeded"):
        place.stack().up(color="never")
    assert (place.known(), place.pending(), place.locks()) == ({"aws:ec2/vpc:Vpc"}, [], [])
    place.obstacles.release(GATEWAY)
    place.stack().up(color="never")
    assert len(_networks()) == 1


@pytest.mark.slow
def test_another_passphrase_opens_nothing_that_changes(place: Place) -> None:
    place.stack().up(color="never")
    for verb in ("up", "destroy", "refresh"):
        with pytest.raises(CommandError, match="incorrect passphrase"):
            getattr(place.stack("wrong"), verb)(color="never")
    assert place.stack("wrong").export_stack().deployment, "the state holds no secret"


@pytest.mark.slow
def test_a_damaged_state_is_no_stack_that_is_gone(place: Place) -> None:
    place.stack().up(color="never")
    whole = place.state_path().read_bytes()
    place.state_path().write_bytes(whole[: len(whole) // 2])
    for act in (lambda: place.stack().destroy(color="never"), lambda: place.stack().export_stack()):
        with pytest.raises(CommandError, match=r"failed to load checkpoint.*unexpected end of JSON input"):
            act()
    place.state_path().unlink()
    with pytest.raises(StackNotFoundError):
        place.select()


def test_without_a_plugin_it_says_what_to_install(place: Place) -> None:
    (place.folder / "bin" / "pulumi-resource-aws").unlink()
    with pytest.raises(CommandError, match="plugin install resource aws"):
        place.stack().up(color="never")
