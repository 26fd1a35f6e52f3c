"""What an agent tells of its network, and when."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.network.reachability import Reachability
from gpuctl.cluster import layout
from gpuctl.cluster.network.records import NodeNetwork, blocked, read_networks
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.waiting import until


class _Nodes:
    """Heartbeats in a bucket, of nodes whose ports are real."""

    def __init__(self, store: Bucket) -> None:
        self.store = store
        self.open = ExitStack()
        self.sockets: dict[str, socket.socket] = {}
        self.records: dict[str, NodeRecord] = {}

    def beat(self, node: str, life: str = "1") -> NodeRecord:
        """A node with a new port."""
        listening = self.open.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.sockets[node] = listening
        port = listening.getsockname()[1]
        record = NodeRecord(node=node, incarnation=life, beat=1, address="127.0.0.1", port=port)
        self.records[node] = record
        self.store.put(layout.node(node), encode(record))
        return record

    def told(self, node: str) -> NodeNetwork | None:
        key = layout.network(node)
        data = self.store.get(key)
        return decode(data, NodeNetwork, key) if data else None

    def reached(self, node: str) -> dict[str, bool]:
        told = self.told(node)
        return {contact.node: contact.ok for contact in told.contacts} if told else {}


@pytest.fixture
def nodes(file_url: str) -> Iterator[_Nodes]:
    made = _Nodes(open_bucket(file_url))
    with made.open:
        yield made


@pytest.fixture
def reachability(nodes: _Nodes) -> Iterator[Reachability]:
    """Of node ``a``; it looks often."""
    me = nodes.beat("a")
    env = {"NCCL_SOCKET_IFNAME": "lo", "HOME": "/root"}
    made = Reachability(nodes.store, lambda: me, env, "local", every_s=0.05)
    made.start()
    yield made
    made.stop()


def test_a_node_tells_of_itself_before_it_knows_of_others(nodes: _Nodes, reachability: Reachability) -> None:
    del reachability
    told = until(lambda: nodes.told("a"), "a word of a")
    assert told.interface == "lo" and told.address == "127.0.0.1" and told.incarnation == "1"
    assert told.env == {"NCCL_SOCKET_IFNAME": "lo"} and told.contacts == ()


def test_who_comes_is_asked_and_who_goes_is_forgotten(nodes: _Nodes, reachability: Reachability) -> None:
    nodes.beat("b")
    nodes.beat("c")
    reachability.members(frozenset("abc"))
    until(lambda: nodes.reached("a") == {"b": True, "c": True}, "b and c to be reached")
    reachability.members(frozenset("ac"))
    until(lambda: nodes.reached("a") == {"c": True}, "b to be forgotten")


def test_a_port_that_is_shut_later_is_found_without_any_other_news(nodes: _Nodes, reachability: Reachability) -> None:
    nodes.beat("b")
    reachability.members(frozenset("ab"))
    until(lambda: nodes.reached("a") == {"b": True}, "b to be reached")
    nodes.sockets["b"].close()
    until(lambda: nodes.reached("a") == {"b": False}, "the loss of b")
    told = read_networks(nodes.store, nodes.records.values())
    assert [(one.source, one.target, one.why) for one in blocked(told)] == [("a", "b", "refused")]


def test_a_node_that_was_started_anew_is_reached_at_its_new_port(nodes: _Nodes, reachability: Reachability) -> None:
    nodes.beat("b")
    reachability.members(frozenset("ab"))
    until(lambda: nodes.reached("a") == {"b": True}, "b to be reached")
    nodes.sockets["b"].close()
    new = nodes.beat("b", life="2")
    told = read_networks(nodes.store, nodes.records.values())
    assert told[0].contacts == () or told[0].contacts[0].port == new.port, "what was told of its last life is dropped"

    def at_the_new_port() -> bool:
        found = nodes.told("a")
        return found is not None and [(c.port, c.ok) for c in found.contacts] == [(new.port, True)]

    until(at_the_new_port, "the new port")


def test_nothing_is_written_while_nothing_changes(nodes: _Nodes, reachability: Reachability) -> None:
    nodes.beat("b")
    reachability.members(frozenset("ab"))
    until(lambda: nodes.reached("a") == {"b": True}, "b to be reached")
    first = nodes.told("a")
    knocks = 0
    listening = nodes.sockets["b"]
    listening.settimeout(5)
    while knocks < 5:  # so many looks
        listening.accept()[0].close()
        knocks += 1
    assert nodes.told("a") == first


def test_what_was_told_is_taken_back_at_the_end_and_means_nothing_of_another_life(nodes: _Nodes) -> None:
    me = nodes.beat("a")
    made = Reachability(nodes.store, lambda: me, {}, "local", every_s=0.05)
    made.start()
    until(lambda: nodes.told("a"), "a word of a")
    assert read_networks(nodes.store, [replace(me, incarnation="2")]) == []
    assert len(read_networks(nodes.store, [me])) == 1
    made.stop()
    assert nodes.told("a") is None
