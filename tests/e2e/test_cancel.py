"""A job that does not end when it is asked to: ``down`` says what it waits for, ``cancel --now`` ends it."""

from __future__ import annotations

import subprocess
import time

import pytest

from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.waiting import PATIENCE_S

STUBBORN = """
    import os, signal, threading
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    threading.Event().wait()
"""
LAST_CHECKPOINT_S = 30.0
"""What workers have for one, when a job is cancelled."""


@pytest.mark.slow
def test_a_deaf_job_is_waited_for_in_words_and_ends_at_once_if_told_so(cluster: Cluster) -> None:
    cluster.up("1")
    job = cluster.train(cluster.write("deaf.py", STUBBORN))
    cluster.wait(lambda: "deaf" in cluster.run("logs", job).stdout, "the script to be deaf")
    down = subprocess.Popen(
        [*cluster.command, "down", "-y"], cwd=cluster.folder, env=cluster.env, stderr=subprocess.PIPE, text=True
    )
    assert down.stderr is not None
    assert down.stderr.readline() == f"waiting for {job} to end after a last checkpoint, 120 s at most\n"
    assert down.stderr.readline() == f"  at once, from another terminal: gpuctl cancel --now {job}\n"
    since = time.monotonic()
    cluster.run("cancel", "--now", job)
    said = down.communicate(timeout=PATIENCE_S)[1]
    assert time.monotonic() - since < LAST_CHECKPOINT_S / 2
    assert said.splitlines()[0] == f"job {job} cancelled"
    assert processes.marked_processes(cluster.state) == []
