"""A request to each cloud, as a user might make it, and the plans that come of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.plan.planner import Plan, PlannedResource, plan
from gpuctl.stacks.request.stack_request import StackRequest

_OF_A_CLOUD: dict[CloudName, dict[str, Any]] = {
    "aws": {"type": "p4d.24xlarge", "region": "us-east-1", "zones": ("us-east-1a",), "account": "123456789012"},
    "gcp": {"type": "a2-highgpu-8g", "region": "us-central1", "zones": ("us-central1-a",), "account": "a-project"},
    "azure": {"type": "Standard_ND96asr_v4", "region": "eastus", "account": "00000000-0000-0000-0000-000000000000"},
}
USER_DATA = "#cloud-config\n"


def asked(provider: CloudName, **changes: Any) -> StackRequest:
    """Four spot machines with eight A100 each, for a user who may log in."""
    usual = {
        "cluster": "demo",
        "provider": provider,
        "nodes_min": 2,
        "nodes_max": 4,
        "ssh_from": "203.0.113.7/32",
        "ssh_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@laptop",
        "user_data": USER_DATA,
        "owner": "Me@Example.com",
        "version": "0.1.0",
        "created": "2026-11-21",
    }
    return StackRequest(**{**usual, **_OF_A_CLOUD[provider], **changes})


@cache
def planned(request: StackRequest) -> Plan:
    """Once for all tests that ask."""
    return plan(request)


class Planned:
    """The resources of a plan, to ask them for what they are made of. Planned when first asked."""

    def __init__(self, request: StackRequest) -> None:
        self.request = request

    @property
    def plan(self) -> Plan:
        return planned(self.request)

    def all(self, kind: str) -> list[PlannedResource]:
        """Those whose Pulumi token ends so, such as ``ec2/vpc:Vpc``."""
        return [resource for resource in self.plan.resources if resource.type.endswith(f":{kind}")]

    def resource(self, kind: str, name: str | None = None) -> PlannedResource:
        """The only one, or the only one of that name."""
        (found,) = [resource for resource in self.all(kind) if name in (None, resource.name)]
        return found

    def one(self, kind: str, name: str | None = None) -> dict[str, Any]:
        """Its inputs."""
        return self.resource(kind, name).inputs
