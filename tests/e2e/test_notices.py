"""A cloud's notice, from its metadata service to the last checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.rounds import NodeExit
from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.e2e.scripts import COUNTING
from tests.fakes.metadata import PROVIDERS, Provider, Service, event_id
from tests.waiting import PATIENCE_S

LEAD_S = 120.0
"""Where the cloud sends a time. AWS promises no more, and a machine that is busy may hear of it late."""


@pytest.fixture(params=[pytest.param(one, marks=[] if one == "aws" else [pytest.mark.slow]) for one in PROVIDERS])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    provider: Provider = request.param
    with Service(provider).running() as service:
        yield service


def _hand_over(cluster: Cluster, node: str, service: Service, root: Path) -> None:
    """From now on this node's agent is one on a machine of a cloud. Both nodes live afterwards."""
    cluster.kill(node)
    path = cluster.node_dir(node) / "identity.json"
    identity = decode(path.read_bytes(), NodeIdentity, str(path))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(identity, provider=service.provider, root=str(root))))
    cluster.env["GPUCTL_METADATA"] = service.url
    cluster.up("1:2")


def _round_of_two(cluster: Cluster, job: str) -> int:
    now = cluster.now(job)
    return now.number if now and len(now.members) == 2 else 0


def _exit(cluster: Cluster, job: str, number: int, node: str) -> NodeExit | None:
    key = layout.node_exit(job, number, node)
    data = cluster.bucket.get(key)
    return decode(data, NodeExit, key) if data else None


def test_a_clouds_notice_becomes_a_last_checkpoint_and_no_step_is_lost(
    cluster: Cluster, service: Service, tmp_path: Path
) -> None:
    cluster.up("1:2")
    machine = tmp_path / "machine"
    _hand_over(cluster, "node-1", service, machine)
    script = cluster.write("count.py", COUNTING)
    job = cluster.train(script, "--", "--steps", "100000", "--every", "100000")
    number = cluster.wait(lambda: _round_of_two(cluster, job), "a round of two")
    cluster.wait_for_step(job, 10, number)
    assert (machine / "run/gpuctl/busy").exists()
    assert msgspec.json.decode((machine / "run/gpuctl/rank0.json").read_bytes())["node"] == cluster.rank0()
    agent = processes.noted_process(cluster.node_dir("node-1"))
    assert agent is not None
    assert service.acknowledged == []
    service.take(lead_s=LEAD_S)

    cluster.wait(lambda: _exit(cluster, job, number, "node-1"), "the node to report")
    node_exit = _exit(cluster, job, number, "node-1")
    assert node_exit is not None
    assert node_exit.status == "drained" and node_exit.notice is not None and node_exit.left_s is not None
    lead_s = 30.0 if service.provider == "gcp" else LEAD_S
    assert node_exit.notice.lead_s == pytest.approx(lead_s, abs=3 if service.provider == "gcp" else 60)
    assert node_exit.notice.source.startswith(f"{service.provider}: ")
    assert 0 < node_exit.left_s < node_exit.notice.lead_s
    (last,) = cluster.checkpoints(job).entries
    assert last.step == node_exit.last_step and last.reason == "notice" and last.left_s is not None

    cluster.wait_for_step(job, last.step + 3)
    now = cluster.now(job)
    assert now is not None and re.fullmatch(
        rf"node-1 given notice, \d+\.\d of {node_exit.notice.lead_s:.0f} s left", now.reason
    )
    assert now.reason in cluster.run("status").stdout
    steps = [record["step"] for record in cluster.metrics(job)]
    assert sorted(steps) == list(range(1, max(steps) + 1)), "none twice, none left out"
    assert processes.wait_until_ended([agent], PATIENCE_S) == []
    said = (cluster.node_dir("node-1") / "agent.log").read_text()
    assert f"s before the end ({node_exit.notice.source})" in said
    assert (machine / "run/gpuctl/leaving").read_text() == node_exit.notice.source
    assert service.acknowledged == ([event_id(service.machine)] if service.provider == "azure" else [])
    cluster.run("cancel", job)


@pytest.mark.slow
def test_a_recommendation_is_seen_in_status_and_takes_no_node(cluster: Cluster, tmp_path: Path) -> None:
    cluster.up("1:2")
    with Service("aws").running() as service:
        _hand_over(cluster, "node-1", service, tmp_path / "machine")
        service.recommend()
        cluster.wait(lambda: "node-1: at risk since 20" in cluster.run("status").stdout, "status to say so")
        service.withdraw()
        cluster.wait(lambda: not cluster.nodes()["node-1"].risk, "the risk to be over")
        assert cluster.nodes()["node-1"].notice is None
