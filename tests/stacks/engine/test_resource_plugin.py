"""What the resource plug-ins of the tests answer, asked by a plain gRPC client as an engine would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import grpc  # type: ignore[import-untyped]
import pytest
from google.protobuf import empty_pb2, struct_pb2  # type: ignore[import-untyped]
from google.protobuf.json_format import MessageToDict, ParseDict  # type: ignore[import-untyped]
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from tests.fakes.aws.api import amazon
from tests.fakes.pulumi import obstacles, resource_plugin
from tests.fakes.pulumi.obstacles import Obstacles

VPC = "urn:pulumi:demo::gpuctl::gpuctl:aws:Network$aws:ec2/vpc:Vpc::demo"
GROUP = "urn:pulumi:demo::gpuctl::aws:ec2/securityGroup:SecurityGroup::nodes"
SUBNET = "urn:pulumi:demo::gpuctl::aws:ec2/subnet:Subnet::demo"
TEMPLATE = "urn:pulumi:demo::gpuctl::gcp:compute/instanceTemplate:InstanceTemplate::demo"
NETWORK = {"cidrBlock": "10.77.0.0/16", "tags": {"gpuctl:cluster": "demo"}}


def _struct(values: dict[str, Any]) -> Any:
    return ParseDict(values, struct_pb2.Struct())


@pytest.fixture
def blocked(tmp_path: Path) -> Obstacles:
    return Obstacles(tmp_path / "obstacles")


@pytest.fixture
def plugin(
    aws_account: None, s3_endpoint: str, tmp_path: Path, blocked: Obstacles, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    del aws_account, blocked
    program = resource_plugin.install(tmp_path / "bin") / "pulumi-resource-aws"
    with amazon(s3_endpoint, [], [384]) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv(obstacles.FOLDER, str(tmp_path / "obstacles"))
        with subprocess.Popen([program, "127.0.0.1:0"], stdout=subprocess.PIPE, env=os.environ) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = provider_pb2_grpc.ResourceProviderStub(channel)
                stub.Configure(provider_pb2.ConfigureRequest(args=_struct({"region": "us-east-1"})), timeout=60)
                yield stub
            process.kill()


def _networks() -> list[str]:
    ec2 = boto3.client("ec2", region_name="us-east-1")
    return [
        one["VpcId"] for one in ec2.describe_vpcs(Filters=[{"Name": "tag-key", "Values": ["gpuctl:cluster"]}])["Vpcs"]
    ]


def test_a_thing_is_checked_made_changed_read_and_deleted(plugin: Any) -> None:
    checked = plugin.Check(provider_pb2.CheckRequest(urn=VPC, news=_struct(NETWORK)))
    made = plugin.Create(provider_pb2.CreateRequest(urn=VPC, properties=checked.inputs))
    assert made.id in _networks()
    assert MessageToDict(made.properties) == NETWORK

    news = _struct({**NETWORK, "tags": {"gpuctl:cluster": "demo", "Name": "demo"}})
    about = {"urn": VPC, "id": made.id, "olds": made.properties, "news": news, "old_inputs": checked.inputs}
    differs = plugin.Diff(provider_pb2.DiffRequest(**about))
    assert (list(differs.diffs), list(differs.replaces)) == (["tags"], [])
    plugin.Update(provider_pb2.UpdateRequest(**about))
    (tags,) = [
        one["Tags"] for one in boto3.client("ec2", region_name="us-east-1").describe_vpcs(VpcIds=[made.id])["Vpcs"]
    ]
    assert {"Key": "Name", "Value": "demo"} in tags

    read = provider_pb2.ReadRequest(urn=VPC, id=made.id, properties=made.properties, inputs=news)
    assert plugin.Read(read).id == made.id
    plugin.Delete(provider_pb2.DeleteRequest(urn=VPC, id=made.id))
    assert made.id not in _networks()
    assert plugin.Read(read).id == "", "it is gone"
    plugin.Delete(provider_pb2.DeleteRequest(urn=VPC, id=made.id))


def test_what_the_cloud_refuses_is_told_in_its_words(plugin: Any, blocked: Obstacles) -> None:
    about = {"vpcId": "vpc-none", "cidrBlock": "10.77.0.0/20", "availabilityZone": "us-east-1a"}
    news = _struct({**about, "tags": {"gpuctl:cluster": "demo"}})
    with pytest.raises(grpc.RpcError) as caught:
        plugin.Create(provider_pb2.CreateRequest(urn=SUBNET, properties=news))
    assert "InvalidVpcID.NotFound" in caught.value.details()
    blocked.refuse("create aws:ec2/vpc:Vpc demo", "VpcLimitExceeded: the maximum has been reached")
    before = _networks()
    with pytest.raises(grpc.RpcError) as caught:
        plugin.Create(provider_pb2.CreateRequest(urn=VPC, properties=_struct(NETWORK)))
    assert caught.value.details() == "VpcLimitExceeded: the maximum has been reached"
    assert _networks() == before


def test_what_has_no_name_gets_one_and_keeps_it(plugin: Any) -> None:
    first = plugin.Check(provider_pb2.CheckRequest(urn=GROUP, news=_struct({"tags": {}}))).inputs
    assert str(first["name"]).startswith("nodes-")
    again = plugin.Check(provider_pb2.CheckRequest(urn=GROUP, olds=first, news=_struct({"tags": {}}))).inputs
    assert again == first


def test_what_cannot_be_changed_is_replaced(plugin: Any) -> None:
    before, news = _struct({"machineType": "a"}), _struct({"machineType": "b"})
    differs = plugin.Diff(provider_pb2.DiffRequest(urn=TEMPLATE, id="1", news=news, old_inputs=before))
    assert list(differs.replaces) == ["machineType"]


def test_cancel_lets_go_on_what_is_under_way(plugin: Any, blocked: Obstacles) -> None:
    operation = "create aws:ec2/vpc:Vpc demo"
    blocked.hold(operation)
    making = plugin.Create.future(provider_pb2.CreateRequest(urn=VPC, properties=_struct(NETWORK)))
    blocked.wait_until_held(operation)
    plugin.Cancel(empty_pb2.Empty())
    blocked.wait_until_cancelled()
    blocked.release(operation)
    made = making.result(60)
    assert made.id in _networks()
    plugin.Delete(provider_pb2.DeleteRequest(urn=VPC, id=made.id))
