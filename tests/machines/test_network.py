"""What nodes on machines tell of their network, beside what the kernel of each says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.machine import as_json
from tests.machines.cloud import Cloud, Instance

pytestmark = pytest.mark.timeout(600)


def test_net_is_right_about_every_interface_and_verify_about_every_pair(cloud: Cloud) -> None:
    instances = cloud.create(3)
    cloud.await_ready(timeout=180)
    told = cloud.wait(lambda: _told(cloud, 3), "all to tell of each other", 90)
    by_name = {node["node"]: node for node in told["nodes"]}
    for instance in instances:
        node = by_name[instance.id]
        mine, there = _interfaces(node), _by_the_kernel(instance)
        assert mine == there
        assert node["address"] in mine[node["interface"]][1]
        assert {contact["node"] for contact in node["contacts"]} == set(by_name) - {instance.id}
        identity = json.loads(instance.machine.read("/var/lib/gpuctl/node/identity.json"))
        assert identity["env"]["GLOO_SOCKET_IFNAME"] == node["interface"]
    assert told["blocked"] == []

    found = as_json(cloud.run("verify", "--burn-in", "0.2", "-o", "json", code=None))
    assert sorted(found["nodes"]) == sorted(by_name)
    pairs = {tuple(sorted(pair["nodes"])) for pair in found["pairs"]}
    assert len(pairs) == 3 and all(pair["bus_gbs"] > 0 for pair in found["pairs"])
    assert [one for one in found["findings"] if "slow" not in one["what"]] == []  # these share two cores


def _told(cloud: Cloud, nodes: int) -> Any:
    found = as_json(cloud.run("net", "-o", "json"))
    seen = [{contact["node"] for contact in node["contacts"]} for node in found["nodes"]]
    return found if len(seen) == nodes and all(len(others) == nodes - 1 for others in seen) else None


def _interfaces(node: Any) -> dict[str, tuple[bool, list[str]]]:
    """Whether each is up, and its addresses."""
    return {one["name"]: (one["up"], sorted(a["address"] for a in one["addresses"])) for one in node["interfaces"]}


def _by_the_kernel(instance: Instance) -> dict[str, tuple[bool, list[str]]]:
    listed = json.loads(instance.machine.run("ip", "-j", "address").stdout)
    return {one["ifname"]: ("UP" in one["flags"], sorted(a["local"] for a in one["addr_info"])) for one in listed}
