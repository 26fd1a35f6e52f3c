"""What the stand-in for Pulumi's engine makes of inputs that are ignored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.pulumi.engine import pinned

BEFORE = {"sku": {"name": "a", "capacity": 0}, "disks": [{"image": "old", "size": 1}]}
NOW = {"sku": {"name": "b", "capacity": 7}, "disks": [{"image": "new", "size": 2}], "tags": {}}


@pytest.mark.parametrize(
    ("paths", "sent"),
    [
        ([], NOW),
        (["sku.capacity"], {**NOW, "sku": {"name": "b", "capacity": 0}}),
        (["disks[0].image"], {**NOW, "disks": [{"image": "old", "size": 2}]}),
        (["tags"], {key: NOW[key] for key in ("sku", "disks")}),
    ],
)
def test_what_is_ignored_is_sent_as_it_was_declared_at_first(paths: list[str], sent: dict[str, Any]) -> None:
    assert pinned(BEFORE, NOW, paths) == sent
