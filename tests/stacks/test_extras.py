"""What a cluster costs besides its machines."""

from __future__ import annotations

import pytest

from gpuctl.stacks.catalog.instance_types import CloudName, catalog
from gpuctl.stacks.clouds.interface import cloud
from tests.fakes.requests import asked


@pytest.mark.parametrize(
    ("provider", "month"),
    # The types have several GPUs, and so fast disks: AWS's with 375 MB/s beyond the 125 of every disk.
    [("aws", 200 * 0.08 + 375 * 0.04), ("gcp", 200 * 0.17), ("azure", 38.01)],
)
def test_disks_are_reckoned_by_the_node(provider: CloudName, month: float) -> None:
    request = asked(provider)
    extras = cloud(provider).extras(request, catalog().type(request.type))
    (disks,) = [one.usd_per_hour for one in extras if one.what == "disks"]
    assert disks == pytest.approx(request.nodes_max * month / 730)
