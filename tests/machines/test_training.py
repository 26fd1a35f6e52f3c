"""Training over the network between machines, while machines come and go."""

from __future__ import annotations

import re
import shutil
import time

import pytest

from gpuctl.cluster.records.rounds import Round
from tests.machines.cloud import Cloud, slowness
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
STEPS = 300
COMMITTED_WITHIN_S = 2.0


def digits(cloud: Cloud, *args: str) -> str:
    """Train the example; returns the job."""
    shutil.copy(EXAMPLES / "digits.py", cloud.folder)
    return cloud.train("digits.py", "--", "--steps", str(STEPS), "--checkpoint-every", "100", *args)


def accuracy(cloud: Cloud, job: str) -> str:
    outcome = cloud.wait_for_end(job, timeout=150).outcome
    assert outcome is not None and outcome.result == "succeeded", outcome
    said = re.findall(r"accuracy=(0\.\d+)", cloud.run("logs", job).stdout)
    assert len(said) == 1
    return str(said[0])


def round_of(cloud: Cloud, job: str, nodes: int, after: int = 0) -> Round | None:
    now = cloud.now(job)
    return now if now and now.phase == "run" and len(now.members) == nodes and now.number > after else None


@pytest.mark.timeout(600)
def test_a_notice_becomes_an_agreed_checkpoint_and_the_replacement_goes_on_with_the_same_result(cloud: Cloud) -> None:
    cloud.create(2)
    cloud.await_ready(timeout=120)
    calm = accuracy(cloud, digits(cloud))
    job = digits(cloud)
    first = cloud.wait(lambda: round_of(cloud, job, 2), "both to train")
    cloud.wait_for_step(job, 40, first.number)
    taken = cloud.instance(cloud.rank0())
    given = time.time()
    cloud.take(taken, lead_s=30)
    saved = cloud.wait(lambda: [e for e in cloud.checkpoints(job).entries if e.reason == "notice"], "a last checkpoint")
    took = saved[-1].at - given
    print(f"committed {took:.2f} s after the notice")
    assert took < COMMITTED_WITHIN_S * slowness()
    assert saved[-1].left_s is not None and saved[-1].left_s > 0
    cloud.wait(lambda: not taken.machine.is_on, "the machine to leave by itself, as its agent is done", 60)
    cloud.wait(lambda: round_of(cloud, job, 2, first.number), "the replacement to join", 120)
    assert accuracy(cloud, job) == calm
    done = [line["step"] for line in cloud.metrics(job) if "loss" in line]
    assert sorted(done) == sorted(set(done)), "no step was done twice"
