"""A machine of a Debian that is newer than the others' here: another systemd, cloud-init, OpenSSH and Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.stacks.providers import node_package
from tests.machines import root
from tests.machines.cloud import Cloud

SUITE, PYTHON = "trixie", "3.13"
WHEELS = "/opt/wheels"
pytestmark = pytest.mark.timeout(600)


def test_user_data_makes_a_machine_of_debian_13_a_node(cloud: Cloud, tmp_path: Path) -> None:
    """With all but torch, whose wheel for this Python may be one for CUDA, of gigabytes."""
    try:
        below, wheels = root.debian(SUITE), root.wheels(PYTHON, ())
    except root.CannotMake as error:
        pytest.skip(f"no Debian 13: {error}")
    place = tmp_path / "layer" / WHEELS.lstrip("/")
    place.mkdir(parents=True)
    for wheel in wheels.iterdir():
        (place / wheel.name).hardlink_to(wheel)
    spec = cloud.spec(package=node_package.publish(cloud.bucket, ()))
    spec = cloud.spec(package=spec.package, env={**spec.env, "PIP_FIND_LINKS": WHEELS})
    (instance,) = cloud.create(1, spec=spec, layers=[tmp_path / "layer", below])
    cloud.await_ready(timeout=300)
    machine = instance.machine
    assert 'VERSION_ID="13"' in machine.read("/etc/os-release")
    assert PYTHON in machine.run("/opt/gpuctl/venv/bin/python", "--version").stdout
    assert machine.run("systemctl", "is-active", "gpuctl-agent.service").stdout == "active\n"
    after = machine.run("systemctl", "show", "--property=After", "gpuctl-agent.service").stdout
    assert {"docker.service", "network-online.target"} <= set(after.strip().partition("=")[2].split())
