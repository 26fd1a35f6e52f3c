"""Jobs that hang are ended, and said to have hung."""

from __future__ import annotations

import pytest

from tests.e2e.machine import Cluster

STALL_S = 4.0

_SLEEPS = """
    import time
    print("waits for a file that does not come", flush=True)
    time.sleep(1e6)
"""

_WAITS_AT_A_STEP = """
    import time
    import torch, torch.distributed as dist
    from gpuctl import Checkpointer, log_metrics

    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(every=10000)
    state = {"model": model}
    checkpointer.restore(state)
    for step in range(1, 8):
        log_metrics(step, loss=1.0)
        checkpointer.step(step, state)
    while True:  # the next batch does not come
        time.sleep(0.5)
        checkpointer.step(step, state)
"""


def _up(cluster: Cluster) -> None:
    cluster.up("1", "--stall-minutes", f"{STALL_S / 60:.4f}")


@pytest.mark.slow
def test_a_job_that_hangs_without_a_step_ends_with_one_line_that_says_so(cluster: Cluster) -> None:
    _up(cluster)
    done = cluster.run("train", cluster.write("sleeps.py", _SLEEPS), code=124)
    assert "stalled: no step" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "stalled: no step and no work" in (cluster.node_dir("node-0") / "agent.log").read_text()


@pytest.mark.slow
def test_a_job_that_hangs_writes_a_last_checkpoint_if_it_still_listens(cluster: Cluster) -> None:
    """One worker does; several agree on the step to come, which does not."""
    _up(cluster)
    job = cluster.train(cluster.write("waits.py", _WAITS_AT_A_STEP), "--max-restarts", "3")
    cluster.wait(lambda: "stalled" in cluster.run("status").stdout, "status to say so")
    outcome = cluster.wait_for_end(job).outcome
    assert outcome is not None and outcome.result == "failed"
    assert outcome.message.startswith("stalled at step 7: no step, and neither GPUs nor CPUs at work")
    assert [entry.step for entry in cluster.checkpoints(job).entries] == [7]
    assert len({r.number for r in cluster.history(job)}) == 1, "it is not begun again"
