"""Who a machine is, by the metadata service of each cloud."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from gpuctl.bootstrap.boot.metadata import Instance, Metadata
from tests.bench.network import entering, is_possible, namespace
from tests.fakes.metadata import PROVIDERS, Provider, Service
from tests.paths import ROOT

SET = "/subscriptions/sub/resourceGroups/gpuctl/providers/Microsoft.Compute/virtualMachineScaleSets/demo"
_GATEWAY = "ip route add default via 10.77.0.1 dev eth0"
WHO = {
    "aws": Instance("i-0123456789abcdef0", "127.0.0.1", "", "us-east-1a", "us-east-1", "p4d.24xlarge", "demo", "spot"),
    "gcp": Instance(
        "demo-x1y2",
        "127.0.0.1",
        "",
        "us-central1-a",
        "us-central1",
        "a2-highgpu-8g",
        "projects/123456789/zones/us-central1-a/instanceGroupManagers/demo",
        "spot",
    ),
    "azure": Instance("demo_3", "127.0.0.1", "", "eastus-1", "eastus", "Standard_ND96asr_v4", SET, "spot"),
}


@pytest.fixture(params=PROVIDERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    provider: Provider = request.param
    with Service(provider).running() as service:
        yield service


def _metadata(service: Service) -> Metadata:
    return Metadata(service.provider, endpoint=service.url)


def test_a_machine_learns_who_it_is(service: Service) -> None:
    assert _metadata(service).instance() == WHO[service.provider]


def test_a_machine_learns_its_public_address_if_it_has_one_and_that_it_is_not_spot(service: Service) -> None:
    service.machine.public_address = "203.0.113.7"
    service.machine.spot = False
    told = _metadata(service).instance()
    assert (told.public_address, told.life) == ("203.0.113.7", "on-demand")


def test_a_machine_of_no_group_says_so() -> None:
    with Service("gcp").running() as service:
        service.machine.group = ""
        assert _metadata(service).instance().group == ""
        service.machine.tags["created-by"] = "projects/123456789/zones/us-central1-a/batchJobs/other"
        assert _metadata(service).instance().group == ""


def test_the_endpoint_may_come_from_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_METADATA", service.url)
    assert Metadata(service.provider).instance().id == service.machine.id


def test_no_proxy_is_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert _metadata(service).instance().id == service.machine.id


def test_a_service_that_is_away_is_an_error_of_the_system(service: Service) -> None:
    service.be_down()
    with pytest.raises(OSError, match="503"):
        _metadata(service).instance()
    with pytest.raises(OSError, match="refused"):
        Metadata(service.provider, endpoint="http://127.0.0.1:9").instance()


@pytest.mark.parametrize("garbage", ["<html>", "[]", "null", ""])
def test_garbage_in_place_of_credentials_is_a_value_error(service: Service, garbage: str) -> None:
    metadata = _metadata(service)
    metadata.instance()
    service.garble(garbage)
    with pytest.raises((ValueError, LookupError)):
        metadata.aws_credentials() if service.provider == "aws" else metadata.token("https://x/")


def test_nobody_is_answered_without_the_header_of_the_cloud(service: Service) -> None:
    paths = {
        "aws": "/latest/meta-data/instance-id",
        "gcp": "/computeMetadata/v1/instance/name",
        "azure": "/metadata/instance?api-version=2021-02-01",
    }
    with pytest.raises(HTTPError) as told:
        urlopen(Request(service.url + paths[service.provider]), timeout=5)
    assert told.value.code == {"aws": 401, "gcp": 403, "azure": 400}[service.provider]
    told.value.close()


def test_a_session_that_ended_is_begun_anew() -> None:
    with Service("aws").running() as service:
        metadata = _metadata(service)
        metadata.instance()
        service.expire_sessions()
        assert metadata.instance().id == service.machine.id
        assert service.seen.count("PUT /latest/api/token") == 2


def test_credentials_are_those_of_the_role_at_this_moment() -> None:
    with Service("aws").running() as service:
        metadata = _metadata(service)
        first, second = metadata.aws_credentials(), metadata.aws_credentials()
        assert [first.key, second.key] == service.keys.given
        assert first.secret == f"secret of {first.key}" and first.token == f"token of {first.key}"
        service.hold_credentials("mine", "own")
        assert metadata.aws_credentials().key == "mine"


def test_a_bearer_token_is_for_whom_it_is_asked() -> None:
    with Service("azure").running() as service:
        assert _metadata(service).token("https://storage.azure.com/").endswith("for https://storage.azure.com/")
    with Service("gcp").running() as service:
        assert _metadata(service).token("") == "token of KEY1"


def test_of_several_identities_that_azure_has_given_a_machine_its_own_is_named() -> None:
    ours = "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/demo"
    with Service("azure").running() as service:
        service.identities = (ours, "that of a policy")
        with pytest.raises(HTTPError) as told:
            _metadata(service).token("https://storage.azure.com/")
        told.value.close()
        metadata = Metadata("azure", endpoint=service.url, identity=ours)
        assert metadata.token("https://storage.azure.com/").endswith("for https://storage.azure.com/")


def test_without_a_cloud_a_machine_is_what_it_calls_itself() -> None:
    told = Metadata("ssh").instance()
    assert told.id and told.group == ""


def test_where_nothing_leads_out_a_machine_has_no_address_until_something_does() -> None:
    if not is_possible():
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    ask = "from gpuctl.bootstrap.boot.metadata import Metadata; print(Metadata('ssh').instance().address)"
    holder = namespace()
    try:
        inside = entering(holder)

        def said() -> str:
            return subprocess.check_output([*inside, sys.executable, "-c", ask], text=True, timeout=60).strip()

        for command in (
            "ip link set lo up",
            "ip link add eth0 type veth peer name far",
            "ip link set far up",
            "ip link set eth0 up",
            "ip addr add 10.77.0.10/24 dev eth0",
        ):
            subprocess.run([*inside, *command.split()], check=True, timeout=20)
        assert said() == ""
        subprocess.run([*inside, *_GATEWAY.split()], check=True, timeout=20)
        assert said() == "10.77.0.10"
    finally:
        holder.kill()
        holder.wait()


def test_the_service_runs_as_a_program_and_tells_machines_apart(service: Service) -> None:
    command = [sys.executable, "-m", "tests.fakes.metadata", "--provider", service.provider, "--address", "127.0.0.1"]
    with subprocess.Popen([*command, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            told = json.loads(program.stdout.readline())

            def order(name: str, **facts: object) -> str:
                url = f"http://127.0.0.1:{told['control']}/{name}"
                with urlopen(Request(url, json.dumps(facts).encode()), timeout=5) as answer:
                    return str(answer.read().decode())

            order("add", id="other_4", address="127.0.0.9")
            order("add", id="this_5", address="127.0.0.1", user_data="#cloud-config\n")
            metadata = Metadata(service.provider, endpoint=told["url"])
            assert metadata.instance().id == "this_5"
            order("take", id="other_4", lead_s=120)
            paths = {
                "aws": "/latest/meta-data/spot/instance-action",
                "gcp": "/computeMetadata/v1/instance/preempted",
                "azure": "/metadata/scheduledevents?api-version=2020-07-01",
            }
            path = paths[service.provider]
            if service.provider == "azure":
                assert [e["Resources"] for e in json.loads(metadata.need(path))["Events"]] == [["other_4"]]
            else:
                assert metadata.get(path) in (None, "FALSE")
                order("take", id="this_5", lead_s=120)
                assert metadata.get(path) not in (None, "FALSE")
            assert f"GET {path}" in json.loads(order("report"))["seen"]
        finally:
            program.terminate()
            program.wait(10)
