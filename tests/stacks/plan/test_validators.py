"""Each rule, where it has something to say and where it has not."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from typer.main import get_command

from gpuctl.cli.commands.machines import up
from gpuctl.cli.settings.resolve import KEYS
from gpuctl.cli.text_commands import single
from gpuctl.stacks.catalog.instance_types import CloudName, MachineType, Price, catalog
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.clouds.user_data import compressed
from gpuctl.stacks.plan.validators import RULES, Draft, findings
from gpuctl.stacks.request.stack_request import StackRequest
from tests.fakes.requests import asked

NC = "Standard_NC24ads_A100_v4"
P3DN, V100 = "p3dn.24xlarge", "n1-standard-8+v100x1"
PRICED = Price(type="any", region="any", spot=1.0, on_demand=2.0)
FINE = asked("aws")
NOISE = "".join(random.Random(0).choices("0123456789abcdef", k=40_000))

FIRES = {
    "gpu-too-old": asked("aws", type=P3DN),
    "own-image-for-old-gpu": asked("gcp", type=V100, image="projects/mine/global/images/closed-driver"),
    "own-image-for-nvlink-5": asked("aws", type="p6-b200.48xlarge", image="ami-1"),
    "several-zones-with-fabric": asked("aws", zones=("us-east-1a", "us-east-1b")),
    "several-zones-for-one-group": asked("gcp", zones=("us-central1-a", "us-central1-b")),
    "too-many-together": asked("azure", nodes_max=101),
    "no-ssh-key": asked("azure", ssh_key=""),
    "ssh-key-not-taken": asked("aws", ssh_key="ecdsa-sha2-nistp256 AAAA me@laptop"),
    "user-data-too-long": asked("aws", user_data=NOISE),
    "not-sold-as-spot": asked("aws"),
    "not-a-machine-image": asked("aws", image="ubuntu:22.04"),
    "fabric-without-placement": asked("aws", placement=False),
    "unknown-price": asked("aws"),
    "no-rdma": asked("gcp"),
    "no-ssh": asked("aws", ssh_from=""),
}
SILENT = {
    "gpu-too-old": [FINE, asked("aws", type=P3DN, image="ami-1"), asked("gcp", type="n1-standard-8+t4x1")],
    "own-image-for-old-gpu": [asked("aws", type=P3DN), asked("aws", image="ami-1")],
    "own-image-for-nvlink-5": [FINE, asked("aws", image="ami-1"), asked("aws", type="p6-b200.48xlarge")],
    "several-zones-with-fabric": [FINE, asked("aws", type="g5.xlarge", zones=("us-east-1a", "us-east-1b"))],
    "several-zones-for-one-group": [asked("gcp"), asked("azure"), asked("aws", zones=("us-east-1a", "us-east-1b"))],
    "too-many-together": [asked("azure", nodes_max=100), asked("azure", nodes_max=101, placement=False), FINE],
    "no-ssh-key": [asked("azure"), FINE, asked("aws", ssh_key="", ssh_from=""), asked("gcp", ssh_key="", ssh_from="")],
    "ssh-key-not-taken": [
        *(FINE, asked("azure"), asked("gcp")),
        asked("gcp", ssh_key="ecdsa-sha2-nistp256 AAAA"),
        asked("gcp", ssh_key="sk-ssh-ed25519@openssh.com AAAA"),
    ],
    "user-data-too-long": [FINE, asked("gcp", user_data=NOISE), asked("azure", user_data=NOISE)],
    "not-sold-as-spot": [asked("aws", spot=False)],
    "not-a-machine-image": [
        FINE,
        asked("aws", image="ami-0123"),
        asked("gcp", image="projects/p/global/images/family/f"),
        asked("gcp", image="https://www.googleapis.com/compute/v1/projects/p/global/images/i"),
        asked("azure", image="microsoft-dsvm:ubuntu-hpc:2204:latest"),
    ],
    "fabric-without-placement": [FINE, asked("aws", placement=False, nodes_min=1, nodes_max=1)],
    "unknown-price": [],
    "no-rdma": [FINE, asked("azure"), asked("gcp", nodes_min=1, nodes_max=1), asked("azure", type=NC)],
    "no-ssh": [FINE],
}


def test_every_rule_is_tested() -> None:
    names = [rule.name for rule in RULES]
    assert set(names) == set(FIRES) == set(SILENT)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", FIRES)
def test_a_rule_fires(name: str) -> None:
    if name == "not-sold-as-spot":
        drafts = [_draft(FIRES[name], machine={"spot": False})]
    elif name == "unknown-price":
        drafts = [_draft(FIRES[name], price=None), _draft(FIRES[name], price=Price(type="", region="", on_demand=1.0))]
    else:
        drafts = [_draft(FIRES[name])]
    for draft in drafts:
        (finding,) = [finding for finding in findings(draft) if finding.rule == name]
        assert finding.message
        assert finding.hint


@pytest.mark.parametrize("name", SILENT)
def test_a_rule_is_silent(name: str) -> None:
    drafts = [_draft(request) for request in SILENT[name]]
    if name == "not-sold-as-spot":
        drafts = [_draft(request, machine={"spot": False}) for request in SILENT[name]]
    if name == "unknown-price":
        on_demand = Price(type="", region="", on_demand=1.0)
        drafts = [_draft(FINE), _draft(asked("aws", spot=False), price=on_demand)]
    assert drafts
    for draft in drafts:
        assert [finding for finding in findings(draft) if finding.rule == name] == []


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("image", ["ubuntu:22.04", "pytorch/pytorch", "nvcr.io/nvidia/pytorch:25.01-py3", "ubuntu"])
def test_a_container_image_is_not_a_machine_image(provider: CloudName, image: str) -> None:
    assert "not-a-machine-image" in [finding.rule for finding in findings(_draft(asked(provider, image=image)))]


def test_all_that_is_wrong_is_said_at_once_and_the_gravest_first() -> None:
    found = findings(_draft(asked("aws", zones=("us-east-1a", "us-east-1b"), placement=False, ssh_from="")))
    assert [finding.severity for finding in found] == ["error", "warning", "note"]


def test_a_v100_stops_up_unless_somebody_brings_an_image_for_it() -> None:
    usual, own = (findings(_draft(asked("aws", type=P3DN, image=image)))[0] for image in ("", "ami-1"))
    assert (usual.severity, usual.rule) == ("error", "gpu-too-old")
    assert usual.hint.startswith("choose a T4 or newer, or add --image with NVIDIA's closed driver, 580 or older")
    assert (own.severity, own.rule) == ("warning", "own-image-for-old-gpu")


def test_what_is_to_be_done_is_something_that_up_knows() -> None:
    """A flag of ``up``, or a key that is in the reference of ``gpuctl.yaml``."""
    params = get_command(single(up.verb)).params
    options = {name for option in params for name in (*option.opts, *option.secondary_opts)}
    for name, request in FIRES.items():
        for finding in findings(_draft(request)):
            assert set(re.findall(r"--[a-z][a-z-]*", finding.hint)) <= options, name
            assert not set(re.findall(r"`(\w+)`", finding.hint)) - {key.name for key in KEYS}, name


def test_what_cloud_init_is_sent_is_the_same_every_time() -> None:
    assert compressed("#cloud-config\n") == compressed("#cloud-config\n")


def _draft(request: StackRequest, machine: dict[str, Any] | None = None, price: Price | None = PRICED) -> Draft:
    of_the_type = catalog().type(request.type, request.provider)
    changed = MachineType(
        **{name: getattr(of_the_type, name) for name in of_the_type.__struct_fields__} | (machine or {})
    )
    return Draft(request, changed, price, cloud(request.provider))
