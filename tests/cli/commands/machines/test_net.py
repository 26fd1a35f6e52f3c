"""``gpuctl net`` over what nodes have told. With nodes that run: ``tests/e2e/test_net.py``."""

from __future__ import annotations

import json
import socket

from gpuctl.cluster import layout
from gpuctl.cluster.network.records import (
    Address,
    ConnectAttempt,
    Gateway,
    Interface,
    Neighbour,
    NodeNetwork,
    RdmaDevice,
)
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from tests.fakes.written_cluster import WrittenCluster


def _tell(written: WrittenCluster, record: NodeRecord, *contacts: ConnectAttempt, life: str = "") -> None:
    network = NodeNetwork(
        node=record.node,
        incarnation=life or record.incarnation,
        address=record.address,
        interface="eth0",
        interfaces=(
            Interface(
                name="eth0",
                up=True,
                virtual=False,
                mac="02:00:00:00:00:01",
                mtu=9001,
                speed_mbps=100_000,
                addresses=(
                    Address(address=record.address, prefix=20, scope="private"),
                    Address(address="fe80::1", prefix=64, scope="link"),
                ),
            ),
            Interface(name="docker0", up=False, virtual=True, kind="bridge"),
        ),
        gateways=(Gateway(address="172.31.0.1", interface="eth0"),),
        neighbours=(Neighbour(address="172.31.0.9", interface="eth0", answers=False, state="FAILED"),),
        cards=(RdmaDevice(name="rdmap16s27", kind="efa", active=True, gbps=100.0),),
        contacts=contacts,
        env={"NCCL_SOCKET_IFNAME": "=eth0"},
    )
    written.store.put(layout.network(record.node), encode(network))


def _to(record: NodeRecord, took_ms: float | None, why: str = "", port: int = 1) -> ConnectAttempt:
    return ConnectAttempt(
        node=record.node, address=record.address, port=port, service="agent", took_ms=took_ms, why=why
    )


def test_tables_for_people(written: WrittenCluster) -> None:
    first, second = written.beat("node-0", view={"node-0": "live", "node-1": "live"}), written.beat("node-1")
    written.lead("node-0", view={"node-0": "live", "node-1": "live"})
    _tell(written, first, _to(second, 0.31))
    _tell(written, second, _to(first, None, "timed out"))
    done = written.run("net")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "node-0 127.0.0.0 on eth0, gateway 172.31.0.1 by eth0" in lines
    assert "eth0 up card 02:00:00:00:00:01 100 Gb/s 9001 127.0.0.0/20 private" in lines
    assert "fe80::1/64 link" in lines and "docker0 down bridge - - 0 - -" in lines
    assert "rdmap16s27 efa active 100 Gb/s" in lines
    assert "172.31.0.9 eth0 - no failed" in lines
    assert "NCCL_SOCKET_IFNAME==eth0" in lines
    assert lines[-3:] == ["FROM \\ TO node-0 node-1", "node-0 - 0.3 ms", "node-1 not agent -"]
    assert "node-1 cannot reach node-0's agent on port 1: timed out; a firewall" in done.stderr


def test_what_a_node_told_in_another_life_or_of_another_life_does_not_count(written: WrittenCluster) -> None:
    written.lead("node-0", view={"node-0": "live", "node-1": "live"})
    first, second = written.beat("node-0", view={"node-0": "live", "node-1": "live"}), written.beat("node-1")
    _tell(written, first, _to(second, None, "refused", port=99))
    _tell(written, second, _to(first, 0.2), life="before")
    done = written.run("net", "-o", "json")
    told = json.loads(done.stdout)
    assert [node["node"] for node in told["nodes"]] == ["node-0"]
    assert told["nodes"][0]["contacts"] == [] and told["blocked"] == []
    assert "node-1 has not reported its network yet" in done.stderr
    assert "?" in written.run("net").stdout


def test_this_machine_can_be_looked_at_without_a_cluster(written: WrittenCluster) -> None:
    told = json.loads(written.run("net", "--here", "-o", "json", "--cluster", "unknown").stdout)
    (node,) = told["nodes"]
    told_of = {interface["name"] for interface in node["interfaces"]}
    assert told_of and told_of <= {name for _, name in socket.if_nameindex()}
    assert "FROM" not in written.run("net", "--here").stdout
    assert "--here shows this machine only" in written.run("net", "--here", "node-0", code=2).stderr


def test_without_a_cluster_it_says_so(written: WrittenCluster) -> None:
    assert "no cluster named 'nowhere'" in written.run("net", "--cluster", "nowhere", code=2).stderr
