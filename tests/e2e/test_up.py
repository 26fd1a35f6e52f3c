"""``gpuctl up`` on local nodes, repeated: what is there stays, what was lost comes back, and the number may change."""

from __future__ import annotations

import shutil

import pytest

from gpuctl.cluster.jobs import queue
from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.e2e.scripts import COUNTING


def _lives(cluster: Cluster) -> dict[str, str]:
    """Each node that runs, and which life of it."""
    return {name: record.incarnation for name, record in cluster.nodes().items()}


@pytest.mark.slow
def test_what_is_there_stays_as_it_is(cluster: Cluster) -> None:
    cluster.up("2", "--slots", "2")
    before, spec = _lives(cluster), queue.cluster_spec(cluster.bucket)
    for args in ([], ["--nodes", "2"], ["--slots", "2"]):
        done = cluster.run("up", *args)
        assert "0 nodes started, 2 already running" in done.stderr
        assert "cluster default is up: 2 nodes (local)" in done.stdout
    assert _lives(cluster) == before
    assert queue.cluster_spec(cluster.bucket) == spec


@pytest.mark.slow
def test_a_lost_node_comes_back(cluster: Cluster) -> None:
    cluster.up("2")
    before = _lives(cluster)
    cluster.kill("node-1")
    assert "1 node started, 1 already running" in cluster.run("up").stderr
    after = _lives(cluster)
    assert after["node-0"] == before["node-0"] and after["node-1"] != before["node-1"]


@pytest.mark.slow
def test_nodes_whose_folders_are_deleted_end(cluster: Cluster) -> None:
    """Nobody could find them any more."""
    cluster.up("2")
    agents = processes.marked_processes(cluster.state)
    assert len(agents) >= 2
    shutil.rmtree(cluster.state / "local")
    cluster.wait(lambda: not any(map(processes.lives, agents)), "the agents to end")
    assert cluster.nodes() == {}, "they have left, and were not lost"
    cluster.up("2")


@pytest.mark.slow
def test_the_number_of_nodes_changes_under_a_job(cluster: Cluster) -> None:
    """More of them join; fewer of them leave with a notice, so that no step is made twice."""
    cluster.up("1")
    cluster.up("1:3")
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "100000")
    cluster.wait(lambda: (now := cluster.now(job)) and len(now.members) == 3 and now.phase == "run", "three nodes")
    number = cluster.history(job)[-1].number
    cluster.wait_for_step(job, 10, number)
    done = cluster.run("up", "--nodes", "1")
    assert "2 nodes ended: " in done.stderr
    assert "1 of 1 nodes live" in cluster.run("status").stdout
    cluster.wait(lambda: (now := cluster.now(job)) and len(now.members) == 1 and now.phase == "run", "one node")
    starts = [line for line in cluster.run("logs", job).stdout.splitlines() if "starts at" in line]
    assert int(starts[-1].split()[4]) >= 10
    assert "given notice" in cluster.history(job)[-1].reason


@pytest.mark.slow
def test_nodes_live_as_soon_as_they_are_up(cluster: Cluster) -> None:
    cluster.up("2")
    assert "2 of 2 nodes live" in cluster.run("status").stdout


@pytest.mark.slow
def test_what_cannot_change_is_refused_in_a_line(cluster: Cluster) -> None:
    cluster.up("1")
    before = _lives(cluster)
    said = cluster.run("up", "--slots", "3", code=2).stderr
    assert said == (
        "error: cluster 'default' exists with slots=default, not 3; "
        "run `gpuctl down` first, or choose another name with --cluster\n"
    )
    assert _lives(cluster) == before


def test_more_nodes_than_this_machine_can_run_are_refused(cluster: Cluster) -> None:
    said = _too_many(cluster)
    assert said.startswith("error: 100000000 nodes are too many for one machine with ")
    assert "; use --nodes " in said and len(said.splitlines()) == 1
    assert not cluster.state.exists()


@pytest.mark.slow
def test_a_cluster_that_is_asked_for_too_many_nodes_stays_as_it_is(cluster: Cluster) -> None:
    cluster.up("1")
    before = _lives(cluster)
    assert "too many" in _too_many(cluster)
    assert queue.cluster_spec(cluster.bucket).nodes_max == 1
    assert _lives(cluster) == before


def _too_many(cluster: Cluster) -> str:
    return cluster.run("up", "--nodes", "100000000", code=2).stderr
