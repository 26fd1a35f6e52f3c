"""From user-data to a node, on machines that boot."""

from __future__ import annotations

import os

import pytest

from tests.machines.cloud import Cloud

READY_WITHIN_S = 10.0


@pytest.mark.timeout(300)
def test_user_data_makes_a_machine_with_its_packages_in_place_a_node_within_ten_seconds(cloud: Cloud) -> None:
    (instance,) = cloud.create(1)
    cloud.await_ready()
    began = float(instance.machine.run("stat", "-c", "%.Y", "/run/cloud-init/enabled").stdout)
    report = cloud.booted(instance)
    assert report
    print(f"ready {report.at - began:.1f} s after cloud-init began")
    assert report.at - began < READY_WITHIN_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
