"""``gpuctl net`` of nodes that run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machine import Cluster, as_json
from tests.e2e.wired import WiredCluster, why_not, wired


@pytest.fixture
def four(tmp_path: Path) -> Iterator[WiredCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with wired(tmp_path, 4) as cluster:
        yield cluster


@pytest.mark.slow
def test_local_nodes_tell_their_networks_and_reach_each_other(cluster: Cluster) -> None:
    cluster.up("3")
    told = _all_told(cluster, 3)
    assert [node["address"] for node in told["nodes"]] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert {node["interface"] for node in told["nodes"]} == {"lo"}
    assert told["blocked"] == []
    shown = cluster.run("net").stdout
    assert "FROM \\ TO" in shown and shown.count(" ms") >= 6 and "GLOO_SOCKET_IFNAME=lo" in shown
    only = as_json(cluster.run("net", "node-1", "-o", "json"))
    assert [node["node"] for node in only["nodes"]] == ["node-1"]
    said = cluster.run("net", "node-9", code=2).stderr
    assert "unknown node 'node-9'" in said and "node-0, node-1, node-2" in said


@pytest.mark.slow
def test_a_node_that_has_left_is_no_part_of_it(cluster: Cluster) -> None:
    cluster.up("1:2")
    _all_told(cluster, 2)
    gone = next(node for node in cluster.nodes() if node != cluster.rank0())
    cluster.run("preempt", gone, "--notice", "20", "--replace-after", "never")
    told = as_json(cluster.run("net", "-o", "json"))
    assert [node["node"] for node in told["nodes"]] == [cluster.rank0()]
    assert cluster.bucket.get(f"net/{gone}.json") is None


@pytest.mark.slow
def test_a_port_that_a_firewall_shuts_is_found_for_that_pair_only(four: WiredCluster) -> None:
    for _ in range(3):
        four.add()
    _all_told(four, 3)
    leader = four.wait(four.rank0, "a rank 0")
    source, target = sorted(node for node in four.nodes() if node != leader)
    port = four.nodes()[target].port
    four.shut(source, target, str(port))
    four.add()  # others come: all look again
    told = _all_told(four, 4)
    assert [(one["source"], one["target"], one["service"], one["port"]) for one in told["blocked"]] == [
        (source, target, "agent", port)
    ]
    assert told["blocked"][0]["why"] == "timed out"
    done = four.run("net")
    assert f"{source} cannot reach {target}'s agent on port {port}: timed out; a firewall" in done.stderr
    assert done.stdout.count("not agent") == 1


def _all_told(cluster: Cluster, nodes: int) -> Any:
    """Once every node has told of every other one."""

    def told() -> Any:
        found = as_json(cluster.run("net", "-o", "json"))
        seen = [{contact["node"] for contact in node["contacts"]} for node in found["nodes"]]
        return found if len(seen) == nodes and all(len(others) == nodes - 1 for others in seen) else None

    return cluster.wait(told, f"{nodes} nodes to tell of each other")
