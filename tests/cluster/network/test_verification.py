"""The judgement over what was measured."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from gpuctl.cluster.network.records import BlockedPort
from gpuctl.cluster.network.verification import (
    AllReduceResult,
    DeviceCheck,
    NodeFabric,
    Transport,
    Verification,
    judged,
    slowest,
)
from gpuctl.cluster.records.clusters import Promised

P4D = Promised(network_gbps=400, fabric="efa", fabric_cards=4)
ND = Promised(network_gbps=1600, fabric="infiniband", fabric_cards=8)
A2 = Promised(network_gbps=100, fabric="gvnic", fabric_cards=1)
EFA = Transport(network="efa", gdr=True, interface="ens32")


def _pairs(nodes: str, slow: dict[str, float] | None = None, usual_gbs: float = 40.0) -> tuple[AllReduceResult, ...]:
    """Between each two of ``nodes``, one letter each. ``slow``: GB/s of pairs (``ab``) and of all pairs of a node."""
    found = []
    for one, other in itertools.combinations(nodes, 2):
        gbs = min((v for k, v in (slow or {}).items() if k in (one, other, one + other)), default=usual_gbs)
        size, ranks = 256 * 1024 * 1024, 16
        seconds = size / (gbs * 1e9) * 2 * (ranks - 1) / ranks
        found.append(AllReduceResult(nodes=(one, other), ranks=ranks, bytes=size, seconds=seconds))
    return tuple(found)


def _sound(nodes: str = "abcd", promised: Promised = P4D) -> Verification:
    transport = replace(EFA, network={"gvnic": "socket"}.get(promised.fabric, promised.fabric))
    cards = {"efa": promised.fabric_cards} if promised.fabric == "efa" else {"infiniband": promised.fabric_cards}
    fabrics = [NodeFabric(node=node, interface="ens32", transport=transport, **cards) for node in nodes]
    devices = [
        DeviceCheck(node=node, rank=rank, device="A100", tflops=250.0, products=900, memory_bytes=10**10)
        for rank, node in enumerate(nodes)
    ]
    return Verification(
        job="verify-1",
        round=1,
        backend="nccl",
        nodes=tuple(nodes),
        devices=tuple(devices),
        pairs=_pairs(nodes, usual_gbs=promised.network_gbps / 8 * 0.8),
        fabrics=tuple(fabrics),
    )


def _said(found: Verification, promised: Promised | None = P4D) -> list[str]:
    return [f"{one.severity}: {one.what} ({one.cause})" for one in judged(found, promised)]


@pytest.mark.parametrize("promised", [P4D, ND, A2, None])
def test_nothing_is_said_of_sound_nodes(promised: Promised | None) -> None:
    assert _said(_sound(promised=promised or P4D), promised) == []


def test_bandwidth_is_counted_as_nccl_tests_does() -> None:
    """algbw = S/t, busbw = algbw * 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md)."""
    measured = AllReduceResult(nodes=("a", "b"), ranks=4, bytes=8_000_000_000, seconds=2.0)
    assert measured.algorithm_gbs == 4.0 and measured.bus_gbs == 6.0
    assert AllReduceResult(nodes=("a", "b"), ranks=2, bytes=10**9, seconds=1.0).bus_gbs == 1.0


def test_a_fall_back_to_tcp_fails_with_its_likely_cause() -> None:
    sound = _sound()
    clue = "NCCL found no plug-in libnccl-net.so"
    fallen = NodeFabric(
        node="b", efa=4, interface="ens32", transport=Transport(network="socket", interface="ens32", clues=(clue,))
    )
    found = replace(sound, fabrics=(sound.fabrics[0], fallen, *sound.fabrics[2:]))
    assert _said(found) == [f"fail: b uses socket between machines, not efa ({clue})"]


def test_missing_cards_are_the_first_cause() -> None:
    sound = _sound()
    bare = NodeFabric(node="b", efa=1, transport=Transport(network="libfabric/tcp", clues=("FI_PROVIDER=efa",)))
    (said,) = _said(replace(sound, fabrics=(sound.fabrics[0], bare, *sound.fabrics[2:])))
    assert said.startswith("fail: b uses libfabric/tcp between machines, not efa (it has 1 of 4 efa cards: ")
    fewer = replace(sound.fabrics[1], efa=3)
    (said,) = _said(replace(sound, fabrics=(sound.fabrics[0], fewer, *sound.fabrics[2:])))
    assert "b: it has 3 of 4 efa cards" in said


def test_missing_cards_are_seen_on_a_node_alone_and_without_nccl() -> None:
    alone = _sound("a")
    bare = replace(alone, fabrics=(NodeFabric(node="a"),))
    assert ["it has 0 of 4 efa cards" in said for said in _said(bare)] == [True]
    assert ["it has 0 of 4 efa cards" in said for said in _said(replace(bare, backend="gloo"))] == [True]


def test_ethernet_in_place_of_infiniband_is_a_fall_back_too() -> None:
    sound = _sound(promised=ND)
    roce = NodeFabric(node="a", infiniband=8, transport=Transport(network="roce"))
    (said,) = _said(replace(sound, fabrics=(roce, *sound.fabrics[1:])), ND)
    assert "a uses roce between machines, not infiniband" in said and "NCCL did not say why" in said


def test_tcp_is_right_where_nothing_else_was_promised() -> None:
    assert _said(_sound(promised=A2), A2) == []


def test_the_wrong_interface_is_a_warning() -> None:
    sound = _sound()
    strayed = replace(sound.fabrics[0], transport=replace(EFA, interface="docker0"))
    (said,) = _said(replace(sound, fabrics=(strayed, *sound.fabrics[1:])))
    assert said.startswith("warn: a: NCCL connects over docker0, not ens32")


@pytest.mark.parametrize("nodes", ["abc", "abcd", "abcdefgh"])
def test_a_node_that_is_slow_with_all_others_is_named_once(nodes: str) -> None:
    said = _said(replace(_sound(nodes), pairs=_pairs(nodes, {"b": 4.0})), None)
    assert len(said) == 1 and said[0].startswith(
        "fail: b is slow with every other node: 4 GB/s at best, the median is 40"
    )


def test_a_pair_that_is_slow_between_sound_nodes_is_named_itself() -> None:
    said = _said(replace(_sound(), pairs=_pairs("abcd", {"bd": 4.0})), None)
    assert len(said) == 1 and said[0].startswith("fail: b and d are slow together: 4 GB/s, the median is 40")


def test_a_slow_pair_beside_a_slow_node_is_found_as_well() -> None:
    said = _said(replace(_sound("abcdef"), pairs=_pairs("abcdef", {"b": 4.0, "de": 5.0})), None)
    assert [line.split(" slow")[0] for line in said] == ["fail: b is", "fail: d and e are"]


def test_two_nodes_have_no_usual() -> None:
    assert _said(replace(_sound("ab"), pairs=_pairs("ab", {"ab": 0.1})), None) == []


def test_all_slow_alike_is_held_against_the_promise() -> None:
    (said,) = _said(replace(_sound(), pairs=_pairs("abcd", usual_gbs=4.1)))
    assert "6 of 6 pairs stay below 50% of 400 Gb/s promised; the slowest, a and b, has 32.8 Gb/s" in said
    assert _said(replace(_sound(), pairs=_pairs("abcd", usual_gbs=26))) == []
    tcp = replace(_sound(promised=A2), pairs=_pairs("abcd", usual_gbs=4.1))
    assert _said(tcp, A2) == [], "TCP is held to a quarter"


def test_gloo_on_cpus_is_not_held_against_the_promise() -> None:
    assert _said(replace(_sound(), backend="gloo", pairs=_pairs("abcd", usual_gbs=1.0))) == []


def test_a_shut_port_names_who_cannot_reach_whom() -> None:
    shut = BlockedPort(source="a", target="c", service="worker", port=40001, why="timed out")
    (said,) = _said(replace(_sound(), blocked=(shut,), pairs=()), None)
    assert said.startswith("fail: a cannot connect to c on port 40001: timed out (a firewall")


def test_broken_devices_are_named_with_what_they_did() -> None:
    sound = _sound()
    wrong = replace(sound.devices[0], wrong_products=3)
    forgetful = replace(sound.devices[1], wrong_words=8)
    lost = replace(sound.devices[2], trouble="CUDA error: device lost")
    slow = replace(sound.devices[3], tflops=100.0)
    said = _said(replace(sound, devices=(wrong, forgetful, lost, slow)), None)
    assert [line.split(" (")[0] for line in said] == [
        "fail: a: A100 of rank 0 computed 3 of 900 products incorrectly",
        "fail: b: A100 of rank 1 read back 8 wrong words from memory",
        "fail: c: A100 of rank 2 failed: CUDA error: device lost",
        "warn: d: A100 of rank 3 is slow: 100 TFLOP/s, the others 250",
    ]


def test_a_wrong_sum_and_an_all_reduce_that_broke_off_fail() -> None:
    pairs = _pairs("abcd")
    broken = (replace(pairs[0], wrong=True), replace(pairs[1], seconds=0.0, trouble="Timed out"), *pairs[2:])
    said = _said(replace(_sound(), pairs=broken), None)
    assert said[0].startswith("fail: the all-reduce among a and b gave a wrong sum")
    assert said[1].startswith("fail: the all-reduce among a and c failed: Timed out")


def test_the_slowest_pair_is_one_that_was_measured() -> None:
    pairs = _pairs("abc", {"ac": 1.0})
    worst = slowest((*pairs, AllReduceResult(nodes=("x", "y"), ranks=2, bytes=1, trouble="failed")))
    assert worst is not None and worst.nodes == ("a", "c")
    assert slowest(()) is None


def test_gpus_that_torch_does_not_see_are_named_once_for_each_node() -> None:
    """Else eight processes a node train on its CPU, and verify has nothing against it."""
    sound = _sound("ab")
    blind = [
        DeviceCheck(node="b", rank=rank, device="cpu", tflops=0, products=0, unseen_gpus=8, trouble="driver too old")
        for rank in (1, 2)
    ]
    found = replace(sound, devices=(sound.devices[0], *blind))
    (said,) = _said(found)
    assert said.startswith("fail: b: torch finds no GPU, and the driver has 8: driver too old (")
