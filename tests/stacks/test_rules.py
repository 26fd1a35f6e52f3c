"""Each rule, where it has something to say and where it has not."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from typer.main import get_command

from gpuctl.cli import up
from gpuctl.cli.settings import KEYS
from gpuctl.cli.verbs import single
from gpuctl.stacks.cloud import cloud
from gpuctl.stacks.machines import MachineType, Price, catalog
from gpuctl.stacks.request import StackRequest
from gpuctl.stacks.rules import RULES, Draft, compressed, findings
from tests.stacks.samples import asked

NC = "Standard_NC24ads_A100_v4"
P3DN, V100 = "p3dn.24xlarge", "n1-standard-8+v100x1"
PRICED = Price(type="any", region="any", spot=1.0, on_demand=2.0)
FINE = asked("aws")
NOISE = "".join(random.Random(0).choices("0123456789abcdef", k=40_000))

FIRES = {
    "gpu-too-old": asked("aws", type=P3DN),
    "own-image-for-old-gpu": asked("gcp", type=V100, image="projects/mine/global/images/closed-driver"),
    "several-zones-with-fabric": asked("aws", zones=("us-east-1a", "us-east-1b")),
    "several-zones-for-one-group": asked("gcp", zones=("us-central1-a", "us-central1-b")),
    "too-many-together": asked("azure", nodes_max=101),
    "no-ssh-key": asked("azure", ssh_key=""),
    "user-data-too-long": asked("aws", user_data=NOISE),
    "not-sold-as-spot": asked("aws"),
    "fabric-without-placement": asked("aws", placement=False),
    "unknown-price": asked("aws"),
    "no-rdma": asked("gcp"),
    "no-ssh": asked("aws", ssh_from=""),
}
SILENT = {
    "gpu-too-old": [FINE, asked("aws", type=P3DN, image="ami-1"), asked("gcp", type="n1-standard-8+t4x1")],
    "own-image-for-old-gpu": [asked("aws", type=P3DN), asked("aws", image="ami-1")],
    "several-zones-with-fabric": [FINE, asked("aws", type="g5.xlarge", zones=("us-east-1a", "us-east-1b"))],
    "several-zones-for-one-group": [asked("gcp"), asked("azure"), asked("aws", zones=("us-east-1a", "us-east-1b"))],
    "too-many-together": [asked("azure", nodes_max=100), asked("azure", nodes_max=101, placement=False), FINE],
    "no-ssh-key": [asked("azure"), asked("aws", ssh_key="")],
    "user-data-too-long": [FINE, asked("gcp", user_data=NOISE), asked("azure", user_data=NOISE)],
    "not-sold-as-spot": [asked("aws", spot=False)],
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
