"""``gpuctl verify`` of nodes that run. GPUs and NCCL have no part in these: here it is CPUs and gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from gpuctl.cli.session.verify_job import verify_new
from gpuctl.cli.settings.resolve import load
from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.network.verification import Verification
from gpuctl.cluster.records.clusters import Promised
from gpuctl.cluster.records.codec import decode, encode
from tests.e2e.machine import Cluster, as_json
from tests.e2e.scripts import COUNTING
from tests.e2e.wired import WiredCluster, why_not, wired

FAST = Promised(network_gbps=400, fabric="efa", fabric_cards=4)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[WiredCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with wired(tmp_path, 3) as cluster:
        for _ in range(3):
            cluster.add()
        yield cluster


@pytest.mark.slow
def test_three_sound_nodes_pass_after_the_job_before_them(cluster: Cluster) -> None:
    cluster.up("3")
    first = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "60")
    done = cluster.run("verify", "--burn-in", "0.2", "-o", "json", code=None)
    found = as_json(done)
    ended = cluster.now(first)
    assert ended is not None and ended.phase == "ended", "it waits its turn"
    assert sorted(found["nodes"]) == ["node-0", "node-1", "node-2"] and found["backend"] == "gloo"
    assert sorted(sorted(pair["nodes"]) for pair in found["pairs"]) == [
        ["node-0", "node-1"],
        ["node-0", "node-2"],
        ["node-1", "node-2"],
    ]
    for one in [*found["pairs"], *found["everyone"]]:
        n = one["ranks"]
        assert one["bus_gbs"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9 * 2 * (n - 1) / n)
    slowest = min(found["pairs"], key=lambda pair: pair["bus_gbs"])
    assert found["slowest"] == slowest["nodes"]
    assert [device["wrong_products"] + device["wrong_words"] for device in found["devices"]] == [0, 0, 0]
    assert all(device["products"] > 1 and device["memory_bytes"] > 1e6 for device in found["devices"])
    wrong = [one for one in found["findings"] if "slow" not in one["what"]]  # these share two cores
    assert wrong == []
    assert (done.returncode == 0) == (found["findings"] == [])
    assert "pairs measured" in done.stderr


@pytest.mark.slow
def test_fewer_nodes_and_several_workers_of_each(cluster: Cluster) -> None:
    cluster.up("2", "--slots", "2")
    found = as_json(cluster.run("verify", "--burn-in", "0.1", "-o", "json"))
    assert (found["workers"], len(found["devices"])) == (2, 4)
    assert [pair["ranks"] for pair in found["pairs"]] == [4]
    alone = cluster.run("verify", "--nodes", "1", "--burn-in", "0.1")
    assert "the slowest pair" not in alone.stdout and "1 node, gloo" in alone.stdout
    cluster.bucket.put(layout.CLUSTER, encode(replace(queue.cluster_spec(cluster.bucket), promised=FAST)))
    bare = cluster.run("verify", "--nodes", "1", "--burn-in", "0.1", code=1)
    assert "it has 0 of 4 efa cards" in bare.stderr and "ls /sys/class/infiniband" in bare.stderr
    too_many = cluster.run("verify", "--nodes", "3", code=2)
    assert "the job needs 3 nodes" in too_many.stderr


@pytest.mark.timing
@pytest.mark.slow
def test_a_node_behind_a_slow_wire_is_named_and_verify_fails(three: WiredCluster) -> None:
    three.slow("node-1", mbit=100)
    spec = replace(queue.cluster_spec(three.bucket), promised=Promised(network_gbps=10))
    three.bucket.put(layout.CLUSTER, encode(spec))
    done = three.run("verify", "--burn-in", "0.1", code=1)
    assert "node-1 is slow with every other node" in done.stderr
    assert "the slowest pair is" in done.stdout and "node-1" in done.stdout.partition("the slowest pair is")[2]
    assert "advertises 10 Gb/s" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.startswith("fail:") and "node-1" not in line]
    job = as_json(three.run("jobs", "-o", "json"))[-1]
    assert job["state"] == "failed" and "node-1 is slow" in job["reason"]


@pytest.mark.slow
def test_a_pair_behind_a_firewall_is_named_where_a_collective_would_hang(three: WiredCluster) -> None:
    job = three.train(three.write("count.py", COUNTING), "--", "--steps", "1")
    three.wait_for_end(job)
    leader = three.rank0()
    source, target = sorted(node for node in three.nodes() if node != leader)
    three.shut(source, target, "1-65534")
    found = as_json(three.run("verify", "--burn-in", "0.1", "-o", "json", code=1))
    shut = {(one["source"], one["target"], one["why"]) for one in found["blocked"]}
    assert shut == {(source, target, "timed out"), (target, source, "timed out")}  # what is answered is dropped as well
    assert found["pairs"] == []
    assert f"{source} cannot connect to {target}" in str(found["findings"])
    assert all("firewall" in finding["cause"] for finding in found["findings"])


@pytest.mark.slow
def test_gpus_that_torch_does_not_see_fail_and_nothing_is_measured_on_cpus_in_their_place(cluster: Cluster) -> None:
    """Nodes with two GPUs, as far as the kernel tells, and a torch for CPUs."""
    if os.getuid() != 0 or torch.cuda.is_available():
        pytest.skip("only root can say what GPUs the kernel has, and none may be there")
    told = (
        "mount -t tmpfs gpus /proc/driver && mkdir -p /proc/driver/nvidia/gpus/0000:00:1e.0 /proc/driver/nvidia/gpus/1"
    )
    user = cluster.command
    cluster.command = ["unshare", "--mount", "sh", "-c", f'{told} && exec "$@"', "sh", *user]
    cluster.up("2")
    cluster.command = user
    done = cluster.run("verify", "--burn-in", "0.1", "-o", "json", code=1)
    found = as_json(done)
    assert sorted(one["what"] for one in found["findings"]) == [
        f"node-{n}: torch finds no GPU, and the driver has 2: Torch not compiled with CUDA enabled" for n in (0, 1)
    ]
    assert found["pairs"] == found["everyone"] == []


@pytest.mark.slow
def test_the_test_of_a_new_cluster_that_has_no_end_is_cancelled_and_told(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.up("2")
    cluster.bucket.put(layout.CLUSTER, encode(replace(queue.cluster_spec(cluster.bucket), promised=FAST)))
    for node in ("node-0", "node-1"):
        cluster.kill(node)  # so the test waits for nodes, for ever
    with pytest.raises(GpuctlError, match=r"timed out after 0\.02 minutes; verify-1 is being cancelled") as told:
        verify_new(cluster.bucket, load({"cluster": cluster.name}), limit_s=1.2)
    assert "gpuctl verify tests again without a limit, gpuctl down ends the cluster" in told.value.hint
    assert "(0.02 minutes at most; Ctrl-C skips it)" in capfd.readouterr().err
    cluster.up("2")
    outcome = cluster.wait_for_end("verify-1").outcome
    assert outcome is not None and outcome.result == "cancelled"


@pytest.mark.slow
def test_a_new_cluster_with_a_fabric_is_tested_once_before_its_first_job(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its nodes are this machine's, and so have neither EFA nor a GPU: whatever is found is of the test that ran."""
    cluster.up("2")
    settings = load({"cluster": cluster.name})
    verify_new(cluster.bucket, settings)
    assert queue.newest(cluster.bucket) is None, "nobody has sold these with a fabric"
    cluster.bucket.put(layout.CLUSTER, encode(replace(queue.cluster_spec(cluster.bucket), promised=FAST)))
    with pytest.raises(GpuctlError, match="it has 0 of 4 efa cards"):
        verify_new(cluster.bucket, settings)
    first = queue.newest(cluster.bucket)
    assert first is not None
    found = decode(cluster.bucket.get(layout.verification(first, 1)) or b"", Verification, first)
    assert sorted(found.nodes) == ["node-0", "node-1"] and len(found.pairs) == 1
    verify_new(cluster.bucket, settings)
    assert queue.newest(cluster.bucket) == first, "once"
    made_anew = replace(queue.cluster_spec(cluster.bucket), created_at=time.time())
    cluster.bucket.put(layout.CLUSTER, encode(made_anew))
    with pytest.raises(GpuctlError, match="it has 0 of 4 efa cards"):
        verify_new(cluster.bucket, settings)
    assert queue.newest(cluster.bucket) != first, "other machines, whatever was tested on those before"
    assert "pairs measured" in capfd.readouterr().err
