"""A machine takes itself out of its group: on moto's auto scaling, and on servers with the shapes of the others' APIs.

moto believes any signature, so that of a request is compared with botocore's.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as TheirCredentials

from gpuctl.bootstrap.boot.idle import watch
from gpuctl.bootstrap.boot.leave import claim, leave
from gpuctl.bootstrap.boot.metadata import Credentials, Metadata
from gpuctl.bootstrap.boot.sigv4 import signed
from tests.fakes.metadata import Provider, Service

FORM = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}


class Cloud:
    """An API that takes note of what it is asked, and answers with one status after the other, the last one again."""

    def __init__(self, statuses: tuple[int, ...]) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        cloud, left = self, list(statuses)

        class Exchange(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                cloud.asked.append((self.command, self.path, headers, body))
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                self.end_headers()
                self.wfile.write(b"no\nright")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def _cloud(*statuses: int) -> Iterator[Cloud]:
    cloud = Cloud(statuses)
    thread = threading.Thread(target=cloud.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield cloud
    finally:
        cloud.server.shutdown()
        cloud.server.server_close()
        thread.join()


class Machine:
    """One that would leave: what it does in the end, and how long it waits."""

    def __init__(self, provider: Provider, service: Service, api: str) -> None:
        self.spec = {"sources": dict.fromkeys(("autoscaling", "compute", "arm"), api)}
        self.metadata = Metadata(provider, endpoint=service.url)
        self.waited: list[float] = []
        self.switched_off = 0

    def leave(self, timeout_s: float = 30.0, *, replace: bool = False) -> bool:
        pause, off = self.waited.append, self._power_off
        how: Any = {"replace": replace, "sleep": pause, "timeout_s": timeout_s, "last_resort": off}
        return leave(self.spec, self.metadata, "idle", **how)

    def _power_off(self) -> None:
        self.switched_off += 1


def _aws(service: str, endpoint: str) -> Any:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    return boto3.client(service, endpoint_url=endpoint, **keys)


def _group_of_two(endpoint: str, name: str) -> tuple[Any, list[str]]:
    """A client, and the instances of a new group."""
    groups = _aws("autoscaling", endpoint)
    image = _aws("ec2", endpoint).describe_images()["Images"][0]["ImageId"]
    groups.create_launch_configuration(LaunchConfigurationName=name, ImageId=image, InstanceType="p4d.24xlarge")
    groups.create_auto_scaling_group(
        AutoScalingGroupName=name,
        LaunchConfigurationName=name,
        MinSize=0,
        MaxSize=2,
        DesiredCapacity=2,
        AvailabilityZones=["us-east-1a"],
    )
    return groups, _members(groups, name)


def _described(groups: Any, name: str) -> Any:
    (told,) = groups.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    return told


def _members(groups: Any, name: str) -> list[str]:
    return sorted(each["InstanceId"] for each in _described(groups, name)["Instances"])


def _wanted(groups: Any, name: str) -> int:
    return int(_described(groups, name)["DesiredCapacity"])


@pytest.mark.slow
def test_an_auto_scaling_group_wants_one_less_and_the_instance_is_gone(s3_endpoint: str) -> None:
    groups, (mine, other) = _group_of_two(s3_endpoint, "leave")
    assert _wanted(groups, "leave") == 2
    with Service("aws").running() as service:
        service.add(id=mine)
        machine = Machine("aws", service, s3_endpoint + "/")
        assert machine.leave()
    assert _wanted(groups, "leave") == 1 and _members(groups, "leave") == [other]
    (told,) = _aws("ec2", s3_endpoint).describe_instances(InstanceIds=[mine])["Reservations"]
    assert told["Instances"][0]["State"]["Name"] in ("shutting-down", "terminated")
    assert (machine.waited, machine.switched_off) == ([], 0)


@pytest.mark.slow
def test_an_auto_scaling_group_replaces_an_instance_that_is_ill(s3_endpoint: str) -> None:
    groups, (mine, other) = _group_of_two(s3_endpoint, "ill")
    with Service("aws").running() as service:
        service.add(id=mine)
        assert Machine("aws", service, s3_endpoint + "/").leave(replace=True)
    assert _wanted(groups, "ill") == 2
    members = _members(groups, "ill")
    assert mine not in members and other in members


@pytest.mark.parametrize(
    ("provider", "call", "said"),
    [
        ("aws", "/", b"ShouldDecrementDesiredCapacity=false"),
        ("gcp", "/instanceGroupManagers/demo/recreateInstances", b"zones/us-central1-a/instances/demo-x1y2"),
        ("azure", "/virtualMachineScaleSets/demo/delete", b'"3"'),
    ],
)
def test_to_be_replaced_a_machine_makes_the_call_that_leaves_the_group_its_size(
    provider: Provider, call: str, said: bytes
) -> None:
    """Azure has none for a machine, and none that its nodes may make: there `gpuctl repair` does it."""
    with Service(provider).running() as service, _cloud(200) as api:
        assert Machine(provider, service, api.url + ("/" if provider == "aws" else "")).leave(replace=True)
        ((_, path, _, body),) = api.asked
    assert path.partition("?")[0].endswith(call) and said in body


def test_what_aws_is_asked_is_signed_with_the_roles_keys() -> None:
    with Service("aws").running() as service, _cloud(200) as api:
        service.hold_credentials("KEY", "secret", "a token")
        assert Machine("aws", service, api.url + "/").leave()
        ((_, path, headers, body),) = api.asked
    assert path == "/" and b"ShouldDecrementDesiredCapacity=true" in body
    assert headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=KEY/")
    assert headers["x-amz-security-token"] == "a token"


def test_a_signature_is_the_one_that_botocore_makes() -> None:
    url, body = "https://autoscaling.us-east-1.amazonaws.com/?b=2&a=x%20y&c=", b"Action=X"
    ours = signed("POST", url, "us-east-1", "autoscaling", Credentials("KEY", "secret", "token"), FORM, body)
    headers = {name: value for name, value in ours.items() if name not in ("Authorization", "X-Amz-Security-Token")}
    request = AWSRequest("POST", url, headers=headers, data=body)
    request.context["timestamp"] = ours["X-Amz-Date"]
    request.headers["X-Amz-Security-Token"] = "token"
    theirs = SigV4Auth(TheirCredentials("KEY", "secret", "token"), "autoscaling", "us-east-1")
    scope = theirs.canonical_request(request)
    signature = theirs.signature(theirs.string_to_sign(request, scope), request)
    assert ours["Authorization"].endswith(f"Signature={signature}")


def test_a_managed_group_of_google_is_asked_to_delete_this_instance() -> None:
    with Service("gcp").running() as service, _cloud(200) as api:
        machine = Machine("gcp", service, api.url)
        assert machine.leave()
        ((_, path, headers, body),) = api.asked
    group = "/compute/v1/projects/123456789/zones/us-central1-a/instanceGroupManagers/demo/deleteInstances"
    assert path.partition("?")[0] == group
    assert headers["authorization"] == "Bearer token of KEY1"
    assert json.loads(body) == {"instances": ["zones/us-central1-a/instances/demo-x1y2"]}


def test_a_scale_set_of_azure_is_asked_to_delete_this_instance() -> None:
    with Service("azure").running() as service, _cloud(202) as api:
        machine = Machine("azure", service, api.url)
        assert machine.leave()
        ((_, path, headers, body),) = api.asked
    home = "/subscriptions/sub/resourceGroups/gpuctl/providers/Microsoft.Compute/virtualMachineScaleSets/demo"
    assert path.partition("?")[0] == f"{home}/delete"
    assert headers["authorization"].endswith("for https://management.azure.com/")
    assert json.loads(body) == {"instanceIds": ["3"]}


def test_a_cloud_that_is_busy_is_asked_again_with_pauses_that_grow() -> None:
    with Service("gcp").running() as service, _cloud(503, 429, 200) as api:
        machine = Machine("gcp", service, api.url)
        assert machine.leave()
        assert len({path for _, path, _, _ in api.asked}) == 1, "the same request, by its id"
        assert len(api.asked) == 3
    assert machine.waited == sorted(machine.waited) and len(machine.waited) == 2
    assert machine.switched_off == 0


@pytest.mark.parametrize("trouble", ["refused", "no metadata", "no group"])
def test_where_nothing_helps_the_power_goes_off(trouble: str, capfd: pytest.CaptureFixture[str]) -> None:
    with Service("gcp").running() as service, _cloud(403) as api:
        machine = Machine("gcp", service, api.url)
        if trouble == "no metadata":
            service.be_down()
        elif trouble == "no group":
            service.machine.group = ""
        assert not machine.leave()
    assert machine.switched_off == 1
    assert len(machine.waited) >= 5
    words = {"refused": "no right", "no metadata": "503", "no group": "is not in a group"}[trouble]
    lines = capfd.readouterr().out.splitlines()
    assert all(words in line for line in lines if "does not let" in line)


def test_a_cloud_that_takes_a_request_and_never_answers_is_given_up() -> None:
    with Service("gcp").running() as service, socket.create_server(("127.0.0.1", 0)) as mute:
        machine = Machine("gcp", service, f"http://127.0.0.1:{mute.getsockname()[1]}")
        assert not machine.leave(timeout_s=0.2)
    assert machine.switched_off == 1


def test_azure_bills_a_machine_that_is_off_so_its_power_stays_on() -> None:
    with Service("azure").running() as service, _cloud(403) as api:
        machine = Machine("azure", service, api.url)
        assert not machine.leave()
        assert not machine.leave(), "it may be tried again"
    assert machine.switched_off == 0


def test_a_machine_of_ssh_stays() -> None:
    def power_off() -> None:
        raise AssertionError

    assert leave({}, Metadata("ssh"), "idle", last_resort=power_off)


def test_of_many_who_claim_at_once_one_does(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: claim(tmp_path, f"reason {n}"), range(16)))
    assert won.count(True) == 1
    assert (tmp_path / "run/gpuctl/leaving").read_text() == f"reason {won.index(True)}"


@pytest.mark.slow
def test_an_idle_machine_shrinks_its_group_and_one_that_is_taken_does_not(s3_endpoint: str, tmp_path: Path) -> None:
    """The watch with all that is real but the machine: the clock, the metadata, the signature, the group."""
    groups, members = _group_of_two(s3_endpoint, "idle")
    taken = threading.Event()

    def sleep(seconds: float) -> None:
        if taken.wait(min(seconds, 0.02)):
            raise StopIteration

    def take_away(spec: Mapping[str, Any], metadata: Metadata, why: str, *, replace: bool) -> None:
        assert leave(spec, metadata, why, replace=replace)
        taken.set()

    for machine, claimed in zip(members, (True, False), strict=True):
        root = tmp_path / machine
        (root / "var/lib/gpuctl/boot").mkdir(parents=True)
        (root / "var/lib/gpuctl/boot/agent.done").touch()
        with Service("aws").running() as service:
            service.add(id=machine)
            spec = {
                "provider": "aws",
                "idle_minutes": 0.005,
                "hold_ill_minutes": 0,
                "sources": {"autoscaling": s3_endpoint + "/"},
            }
            if claimed:
                assert claim(root, "aws: terminate")
                threading.Timer(1.5, taken.set).start()
            with pytest.raises(StopIteration):
                watch(root, spec, Metadata("aws", endpoint=service.url), sleep=sleep, take_away=take_away)
        taken.clear()
        assert _wanted(groups, "idle") == (2 if claimed else 1)
