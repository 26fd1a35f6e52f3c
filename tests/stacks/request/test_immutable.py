"""What a later ``up`` may not ask of machines that there are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.request.immutable import refuse_changes
from tests.fakes.requests import asked


@pytest.mark.parametrize(
    ("provider", "change", "line"),
    [
        ("aws", {"type": "g5.2xlarge"}, "machines of p4d.24xlarge, not g5.2xlarge"),
        ("aws", {"region": "us-west-2"}, "machines in us-east-1, not us-west-2"),
        ("gcp", {"zones": ("us-central1-b",)}, "machines in zone us-central1-a, not us-central1-b"),
        ("gcp", {"placement": False}, "machines that were to be side by side, not apart"),
        ("aws", {"bucket": "s3://another/place"}, "its bucket at s3://gpuctl-demo-"),
        ("azure", {"spot": False}, "machines as spot, not on demand"),
    ],
)
def test_what_cannot_be_changed_is_named_with_what_it_is(
    provider: CloudName, change: dict[str, Any], line: str
) -> None:
    before = asked(provider)
    with pytest.raises(BadInput, match=re.escape(f"demo has {line}")) as refused:
        refuse_changes(before, asked(provider, **change), before.zones)
    assert refused.value.hint == "run `gpuctl down --cluster demo` first, or choose another name with --cluster"


@pytest.mark.parametrize(
    ("provider", "change"),
    [
        ("aws", {"nodes_max": 9, "ssh_from": "", "user_data": "#cloud-config\nother\n"}),
        ("aws", {"zones": ()}),
        ("aws", {"spot": False}),
        ("gcp", {"spot": False}),
    ],
)
def test_all_else_may_change(provider: CloudName, change: dict[str, Any]) -> None:
    before = asked(provider)
    refuse_changes(before, asked(provider, **change), before.zones)
