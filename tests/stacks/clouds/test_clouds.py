"""What holds for all three clouds."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from typing import Any

import msgspec
import pulumi
import pytest
import yaml
from pulumi.runtime.stack import Stack

from gpuctl.bootstrap.node_spec import Package
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName, catalog
from gpuctl.stacks.clouds import aws, azure, gcp
from gpuctl.stacks.clouds.extras import needs
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.plan.planner import PlannedResource, declared, recorded
from gpuctl.stacks.program import declare
from gpuctl.stacks.rented.clusters import with_user_data
from gpuctl.stacks.request.last_request import NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest
from tests.fakes.requests import asked, planned
from tests.paths import ROOT

MODULES = ("network", "storage", "identity", "group")
PACKAGES = {"aws": "pulumi_aws", "gcp": "pulumi_gcp", "azure-native": "pulumi_azure_native"}
TAGGED_BY = {"aws": "tags", "gcp": "labels", "azure-native": "tags"}
"""Google's ``tags`` are another thing: they name the machines that a rule of a firewall is for."""


@pytest.mark.parametrize("provider", CLOUDS)
def test_every_resource_whose_type_takes_tags_carries_the_clusters(provider: CloudName) -> None:
    resources = [resource for resource in planned(asked(provider)).resources if _taggable(resource)]
    assert len(resources) >= 2
    for resource in resources:
        assert _tag(resource) == "demo", resource


@pytest.mark.parametrize("provider", CLOUDS)
def test_all_five_tags_are_told(provider: CloudName) -> None:
    keys = {key for resource in planned(asked(provider, id="0a1b2c3d4e")).resources for key in _tags(resource)}
    assert {key.replace("-", ":") for key in keys} >= {
        "gpuctl:cluster",
        "gpuctl:id",
        "gpuctl:version",
        "gpuctl:owner",
        "gpuctl:created",
    }


@pytest.mark.parametrize(
    ("provider", "spot", "seconds"),
    [
        ("aws", True, 140),
        ("aws", False, 140),
        ("gcp", True, 30),
        ("gcp", False, 85),
        ("azure", True, 30),
        ("azure", False, 30),
    ],
)
def test_machines_are_told_how_long_their_cloud_waits_for_a_shutdown(
    provider: CloudName, spot: bool, seconds: float
) -> None:
    assert _settings(asked(provider, spot=spot), NodeOptions())["shutdown_s"] == seconds


def test_machines_are_told_how_long_to_stay_when_they_are_ill() -> None:
    assert _settings(asked("aws"), NodeOptions(hold_ill_minutes=60))["hold_ill_minutes"] == 60


@pytest.mark.parametrize("provider", CLOUDS)
def test_512_nodes_are_as_many_resources_as_four(provider: CloudName) -> None:
    four = [(r.type, r.name) for r in planned(asked(provider)).resources]
    assert [(r.type, r.name) for r in planned(asked(provider, nodes_max=512)).resources] == four


@pytest.mark.parametrize("provider", CLOUDS)
def test_the_program_tells_where_the_bucket_the_group_and_the_machines_are(provider: CloudName) -> None:
    request = asked(provider)
    outputs: dict[str, object] = {}

    def program() -> None:
        declare(request)
        stack = pulumi.runtime.get_root_resource()
        assert isinstance(stack, Stack)
        pulumi.Output.all(**stack.outputs).apply(outputs.update)

    recorded(program, "demo")
    scheme = {"aws": "s3", "gcp": "gs", "azure": "az"}[provider]
    theirs = {"resource_group"} if provider == "azure" else set()
    assert set(outputs) == {"bucket", "group", "region", "zones", "account"} | theirs
    assert outputs["bucket"] == request.bucket_url(), "the machines were told another one"
    assert str(outputs["bucket"]).startswith(f"{scheme}://gpuctl")
    assert str(outputs["bucket"]).partition("?")[0].endswith("/demo")
    assert outputs["group"] == ("demo" if provider == "aws" else "gpuctl-demo")
    assert (outputs["region"], outputs["zones"]) == (request.region, list(request.zones))


@pytest.mark.parametrize("provider", ["aws", "gcp"])  # to Azure a size is a word
def test_every_family_of_the_catalog_can_be_planned(provider: CloudName) -> None:
    families = {machine.family: machine for machine in catalog().types if machine.provider == provider}
    for machine in families.values():
        assert declared(asked(provider, type=machine.name), machine)


def test_the_clouds_have_one_shape() -> None:
    shapes = {name: [_shape(name, module) for module in MODULES] for name in CLOUDS}
    assert shapes["gcp"] == shapes["azure"] == shapes["aws"]


@pytest.mark.parametrize("provider", CLOUDS)
def test_no_dict_stands_where_a_misspelt_key_would_vanish(provider: CloudName) -> None:
    """Pulumi's typed arguments refuse a name that they do not know; in a dict it is simply not sent."""
    paths = sorted((ROOT / "stacks" / "clouds" / provider).rglob("*.py"))
    assert {f"{module}.py" for module in MODULES} <= {path.name for path in paths}
    for path in paths:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr[0].isupper():
                values = [keyword.value for keyword in call.keywords]
                values += [item for value in values if isinstance(value, ast.List) for item in value.elts]
                assert not any(isinstance(value, ast.Dict) for value in values), f"{path.name}:{call.lineno}"


def test_a_misspelt_argument_is_an_error() -> None:
    from pulumi_aws import ec2

    with pytest.raises(TypeError, match="http_token"):
        ec2.LaunchTemplateMetadataOptionsArgs(http_token="required")  # type: ignore[call-arg]


def test_a_misspelt_key_of_a_request_is_an_error() -> None:
    text = msgspec.json.encode({**msgspec.to_builtins(asked("aws")), "nodes_maximum": 8})
    with pytest.raises(msgspec.ValidationError, match="nodes_maximum"):
        msgspec.json.decode(text, type=StackRequest)


@pytest.mark.parametrize("module", [aws, gcp, azure], ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_machines_have_no_rdma_is_said_plainly(module: Any) -> None:
    said = module.__doc__ or ""
    assert {aws: "EFA", gcp: "no RDMA", azure: "have none"}[module] in said


def test_a_cloud_that_is_none_names_those_that_are() -> None:
    with pytest.raises(BadInput, match="unknown provider 'ibm'; use one of: local, ssh, aws, gcp, azure"):
        cloud("ibm")


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    error = needs("gcp", ModuleNotFoundError("No module named 'pulumi_gcp'", name="pulumi_gcp"))
    assert str(error) == "gcp needs pulumi_gcp, which is not installed; pip install 'gpuctl-spot[gcp]'"


def _taggable(resource: PlannedResource) -> bool:
    package, rest = resource.type.split(":", 1)
    if package not in PACKAGES:
        return False
    module, _, name = rest.rpartition(":")
    made = getattr(importlib.import_module(f"{PACKAGES[package]}.{module.partition('/')[0]}"), name)
    return TAGGED_BY[package] in inspect.signature(made._internal_init).parameters


def _tag(resource: PlannedResource) -> str | None:
    found = _tags(resource)
    return found.get("gpuctl:cluster", found.get("gpuctl-cluster"))


def _tags(resource: PlannedResource) -> dict[str, str]:
    tags = resource.inputs.get(TAGGED_BY.get(resource.type.partition(":")[0], "tags"), {})
    if isinstance(tags, list):  # an auto scaling group's say whether machines get them too
        return {tag["key"]: tag["value"] for tag in tags}
    return dict(tags)


def _shape(provider: str, module: str) -> tuple[str, list[str]]:
    made_by = importlib.import_module(f"gpuctl.stacks.clouds.{provider}.resources.{module}")
    component = getattr(made_by, module.capitalize())
    assert issubclass(component, pulumi.ComponentResource)
    return component.__name__, list(inspect.signature(component.__init__).parameters)


def _settings(request: StackRequest, terms: NodeOptions) -> dict[str, Any]:
    """What its machines find in ``/etc/gpuctl/node.json``."""
    gpuctl = Package(wheel="w", sha256="0", constraints="c", constraints_sha256="0")
    told = yaml.safe_load(with_user_data(request, gpuctl, terms).user_data)
    (text,) = [file["content"] for file in told["write_files"] if file["path"] == "/etc/gpuctl/node.json"]
    found: dict[str, Any] = json.loads(text)
    return found
