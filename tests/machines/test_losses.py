"""Three machines, one of them without power, frozen, cut off or slow while a job runs; and healed after each test."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpuctl.cluster.records.rounds import Round
from tests.e2e.scripts import COUNTING
from tests.machines.cloud import Cloud, Instance, Site
from tests.machines.network import HOST

LEASE_S = 3.0
GRADIENTS_BYTES = 4 * (16 * 32 + 32 + 32 + 1)
"""Of the model in ``COUNTING``."""


@pytest.fixture(scope="module")
def trio(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    made = Cloud(site, tmp_path_factory.mktemp("trio"))
    try:
        made.create(3, "2:3")
        made.write("count.py", COUNTING)
        yield made
    finally:
        made.end()


@pytest.fixture
def cloud(trio: Cloud) -> Iterator[Cloud]:
    """All three machines are there, and no job; whatever a test did to the network is undone after it."""
    trio.await_ready(*(each for each in trio.instances if each.machine.is_on), timeout=120)
    trio.wait(lambda: len(living(trio)) == 3, "three nodes to live")
    try:
        yield trio
    finally:
        trio.site.network.mend()
        if (job := trio.newest_job()) and (now := trio.now(job)) and now.phase != "ended":
            trio.run("cancel", job)


def living(cloud: Cloud) -> list[str]:
    """Nodes that take part, as rank 0 says."""
    leader = cloud.nodes().get(cloud.rank0())
    on = {each.id for each in cloud.instances if each.machine.is_on}
    return [node for node, state in leader.view.items() if state == "live" and node in on] if leader else []


def counting(cloud: Cloud, steps: int, every: int = 20) -> str:
    job = cloud.train("count.py", "--", "--steps", str(steps), "--every", str(every))
    first = cloud.wait(lambda: running(cloud, job, 3), "three nodes to train")
    cloud.wait_for_step(job, 20, first)
    return job


def running(cloud: Cloud, job: str, nodes: int, after: int = 0) -> int | None:
    """The number of the round that runs, if it has so many members and comes after ``after``."""
    now = cloud.now(job)
    return now.number if now and now.phase == "run" and len(now.members) == nodes and now.number > after else None


def members(cloud: Cloud, job: str) -> list[str]:
    now = cloud.now(job)
    return [member.node for member in now.members] if now else []


def succeeded(cloud: Cloud, job: str) -> list[Round]:
    outcome = cloud.wait_for_end(job, timeout=150).outcome
    assert outcome is not None and outcome.result == "succeeded", outcome
    return cloud.history(job)


def in_order(cloud: Cloud, job: str) -> None:
    """Nobody who was deposed has decided or committed anything."""
    history = cloud.history(job)
    assert [r.number for r in history] == sorted(r.number for r in history)
    assert [r.epoch for r in history] == sorted(r.epoch for r in history)
    entries = cloud.checkpoints(job).entries
    assert [e.round for e in entries] == sorted(e.round for e in entries)


def rank0(cloud: Cloud) -> Instance:
    return cloud.instance(cloud.rank0())


def another(cloud: Cloud) -> Instance:
    leader = cloud.rank0()
    return cloud.instance(next(node for node in living(cloud) if node != leader))


def test_rank_0_loses_power_and_the_others_go_on_until_its_replacement_is_there(cloud: Cloud) -> None:
    job = counting(cloud, 100_000)
    lost = rank0(cloud)
    began = time.monotonic()
    lost.machine.lose_power()
    two = cloud.wait(lambda: running(cloud, job, 2, after=1), "the two others to go on")
    assert lost.id not in members(cloud, job)
    print(f"the next round began {time.monotonic() - began:.1f} s after the power loss")
    cloud.wait_for_step(job, 20, two)
    three = cloud.wait(lambda: running(cloud, job, 3, after=two), "the replacement to join", 120)
    cloud.wait_for_step(job, 20, three)
    in_order(cloud, job)


def test_a_frozen_rank_0_that_wakes_later_than_its_lease_decides_and_commits_nothing(cloud: Cloud) -> None:
    job = counting(cloud, 100_000, every=5)
    frozen = rank0(cloud)
    frozen.machine.freeze()
    two = cloud.wait(lambda: running(cloud, job, 2, after=1), "the two others to go on")
    cloud.wait_for_step(job, 40, two)
    epochs = cloud.history(job)[-1].epoch
    frozen.machine.thaw()
    cloud.wait(lambda: running(cloud, job, 3, after=two), "it to be back among them")
    assert cloud.rank0() != frozen.id
    assert cloud.history(job)[-1].epoch == epochs
    in_order(cloud, job)


def test_a_machine_that_the_others_cannot_reach_does_not_stop_the_job(cloud: Cloud) -> None:
    """It still reaches the bucket: its heartbeat goes on."""
    job = counting(cloud, 100_000)
    alone = another(cloud)
    for each in cloud.instances:
        if each.machine.is_on and each is not alone:
            cloud.site.network.cut(alone.machine.address, each.machine.address)
    two = cloud.wait(lambda: running(cloud, job, 2, after=1), "the two others to go on without it")
    assert alone.id not in members(cloud, job)
    cloud.wait_for_step(job, 30, two)
    cloud.site.network.mend()
    cloud.wait(lambda: running(cloud, job, 3, after=two), "it to be back among them")
    in_order(cloud, job)


def test_a_machine_that_cannot_reach_the_bucket_for_a_while_costs_what_was_not_saved(cloud: Cloud) -> None:
    job = counting(cloud, 900)
    silent = another(cloud)
    kept = cloud.wait(lambda: cloud.checkpoints(job).entries, "the first checkpoint")[-1].step
    cloud.site.network.cut(silent.machine.address, HOST)
    until = time.monotonic() + 3 * LEASE_S
    cloud.wait(lambda: time.monotonic() > until, "it to be silent for three leases")
    cloud.site.network.mend()
    succeeded(cloud, job)
    done = [line["step"] for line in cloud.metrics(job) if "loss" in line]
    assert all(step > kept for step in set(done) if done.count(step) > 1)
    in_order(cloud, job)


def test_rank_0_without_the_bucket_is_deposed_and_the_job_goes_on(cloud: Cloud) -> None:
    job = counting(cloud, 100_000)
    cut = rank0(cloud)
    cloud.site.network.cut(cut.machine.address, HOST)
    cloud.wait(lambda: cloud.rank0() != cut.id, "another rank 0")
    cloud.site.network.mend()
    step = cloud.step(job)
    cloud.wait(lambda: running(cloud, job, 3) and cloud.step(job) > step + 20, "all three to train")
    in_order(cloud, job)


def test_a_slow_network_makes_a_job_slow_and_nothing_else(cloud: Cloud) -> None:
    slow = another(cloud)
    cloud.site.network.limit(slow.machine.name, 0.5)
    job = counting(cloud, 140)
    step, began = cloud.step(job), time.monotonic()
    history = succeeded(cloud, job)
    per_step_s = (time.monotonic() - began) / (140 - step)
    print(f"{per_step_s:.3f} s a step at 0.5 Mbit/s")
    assert per_step_s > GRADIENTS_BYTES * 8 / 0.5e6, "each machine receives all gradients in each step"
    assert len({r.number for r in history if r.phase == "run"}) == 1, "nobody was taken for lost"
