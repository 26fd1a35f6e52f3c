"""How ``gpuctl verify`` shows what was found. With nodes that run: ``tests/e2e/test_verify.py``."""

from __future__ import annotations

from gpuctl.cli.commands.machines.verify import lines
from gpuctl.cluster.network.verification import AllReduceResult, DeviceCheck, NodeFabric, Transport, Verification
from gpuctl.cluster.records.clusters import Promised


def _found() -> Verification:
    gib = 1024**3
    return Verification(
        job="verify-4",
        round=1,
        backend="nccl",
        nodes=("a", "b", "c"),
        workers=8,
        devices=(
            DeviceCheck(node="a", rank=0, device="A100", tflops=251.3, products=912, memory_bytes=36 * gib),
            DeviceCheck(node="b", rank=8, device="A100", tflops=0.0, products=0, trouble="device lost"),
        ),
        pairs=(
            AllReduceResult(nodes=("a", "b"), ranks=16, bytes=256_000_000, seconds=0.012),
            AllReduceResult(nodes=("a", "c"), ranks=16, bytes=256_000_000, seconds=0.12),
            AllReduceResult(nodes=("b", "c"), ranks=16, bytes=256_000_000, trouble="Timed out waiting for b"),
        ),
        everyone=(AllReduceResult(nodes=("a", "b", "c"), ranks=24, bytes=512_000_000, seconds=0.04),),
        fabrics=(
            NodeFabric(node="a", efa=4, transport=Transport(network="efa", gdr=True)),
            NodeFabric(node="b", efa=0, transport=Transport(network="socket")),
        ),
    )


def test_tables_show_each_device_network_and_pair_beside_the_promise() -> None:
    shown = [" ".join(line.split()) for line in lines(_found(), Promised(network_gbps=400, fabric="efa"))]
    assert shown[0] == "verify-4 3 nodes, nccl; the vendor advertises 400 Gb/s"
    assert "a 0 A100 251 912 38.7 GB 0" in shown
    assert "b 8 A100 0 0 0 B device lost" in shown
    assert "a efa yes 4 0" in shown and "b socket no 0 0" in shown
    assert "a b 16 256 MB 12 ms 21.3 40 80%" in shown  # 256 MB / 12 ms, times 2 * 15/16
    assert "b c 16 256 MB Timed out waiting for b - - -" in shown
    assert "all 3 24 512 MB 40 ms 12.8 24.5 49%" in shown
    assert shown[-1] == "the slowest pair is a and c: 4 GB/s"


def test_without_a_promise_and_without_nccl_nothing_is_made_up() -> None:
    found = Verification(
        job="verify-1",
        round=1,
        backend="gloo",
        nodes=("a",),
        devices=(DeviceCheck(node="a", rank=0, device="cpu", tflops=0.05, products=9, memory_bytes=1000),),
        fabrics=(NodeFabric(node="a"),),
    )
    shown = "\n".join(lines(found, None))
    assert "sold" not in shown and "EFA" not in shown and "BETWEEN" not in shown and "slowest" not in shown
