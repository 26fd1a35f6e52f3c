"""Others who write to the same bucket: ranks of a round that is over and do not know it, and another job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.checkpoints import deletion, listing
from gpuctl.cluster.checkpoints.commit_log import CommitLog, needed_by
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import Fenced
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.worker_context import STDERR_MARK, WorkerContext
from tests.trainers.checkpoint_checks import committed, copied, goes_on, objects, read_meanwhile, torn
from tests.trainers.rank_scripts import named_steps
from tests.trainers.rank_scripts.named_steps import Who
from tests.trainers.ranks import Ranks, run

FENCED = (
    "round 3 of this job has begun, so round 2 may not write checkpoints any more; "
    "a newer round has replaced this process; exiting"
)


@pytest.mark.slow
def test_ranks_of_a_round_that_is_over_commit_nothing_and_delete_nothing_that_is_needed(tmp_path: Path) -> None:
    """Frozen at each point of their save of step 5, one or both, while a newer round saves older steps, or newer ones
    if step 5 was committed, and sweeps; then they wake."""
    first = (tmp_path / "first").as_uri()
    run(2, named_steps.save_steps, first, [1])
    calm = copied(open_bucket(first), (tmp_path / "calm").as_uri())
    points = run(2, named_steps.go_on, [calm, calm], -1, "", "itself", "", 0, 4)
    saving = [names[max(n for n, name in enumerate(names) if name == "after all_gather #5") :] for names in points]
    whos: tuple[Who, ...] = ("itself", "all")
    cases = [(rank, name, who) for rank, names in enumerate(saving) for name in names for who in whos]

    def tried(number: int, case: tuple[int, str, Who]) -> bool:
        rank, point, who = case
        url, mark = copied(open_bucket(first), (tmp_path / f"{number}").as_uri()), tmp_path / f"{number}.met"
        store = open_bucket(url)
        with (
            read_meanwhile(url),
            Ranks(2, named_steps.go_on, [url, url], rank, point, who, str(mark), signal.SIGSTOP, 4) as sleepers,
        ):
            frozen = those_frozen(sleepers, mark, [rank] if who == "itself" else [0, 1])
            found = run(2, named_steps.save_two_more, url)[0]
            log = committed(store)
            for sleeper in frozen:
                sleepers.send(sleeper, signal.SIGCONT)
            ended = sleepers.wait()
            assert committed(store) == log
            assert objects(store) >= needed_by(store, log)
        fenced = [isinstance(end.error, Fenced) for end in ended]
        done = [(end.code, end.said) == (0, "") for end in ended]
        assert all(fenced) or (found == 5 and all(done)), (case, ended)
        for end in ended:
            assert "gpuctl: " not in end.said, "the error is all there is to say"
            assert not end.error or str(end.error) == FENCED
        goes_on(url, {found + 2}, case)
        return all(fenced)

    with ThreadPoolExecutor(2) as pool:
        assert {*pool.map(tried, range(len(cases)), cases)} == {True, False}


def those_frozen(ranks: Ranks, mark: Path, which: list[int]) -> list[int]:
    """Those of ``which`` that did not end before they were frozen, once all are one or the other."""
    deadline = time.monotonic() + 60
    while not mark.exists() or any(status(ranks.pid(rank)) not in ("gone", psutil.STATUS_STOPPED) for rank in which):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return [rank for rank in which if status(ranks.pid(rank)) != "gone"]


def status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


_WORKER = """
import sys
from multiprocessing import get_context
from gpuctl.trainers.launchers.torchrun import run_script
worker = get_context("fork").Process(target=run_script, args=(sys.argv[1],))
worker.start()
worker.join()
sys.exit(worker.exitcode)
"""
"""Forked as torch's launcher does it: such a process ends without what a whole interpreter takes down."""


@pytest.mark.slow
def test_a_script_that_a_newer_round_shuts_out_ends_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    context = WorkerContext("demo", (tmp_path / "bucket").as_uri(), "digits", 2, "node-0", tmp_path, tmp_path, tmp_path)
    place = open_bucket(context.bucket).at(layout.checkpoints("digits"))
    CommitLog(place, 3, Retention()).begin()
    script = tmp_path / "train.py"
    script.write_text("from gpuctl import Checkpointer\nCheckpointer().restore({})\n")
    ended = subprocess.run(
        [sys.executable, "-c", _WORKER, script],
        env={**os.environ, **context.env()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, f"{STDERR_MARK.decode()}gpuctl: {FENCED}\n")


@pytest.mark.slow
def test_two_jobs_in_one_bucket_see_and_sweep_nothing_of_each_other(bucket_url: str) -> None:
    """At the same time, with the same steps, and one's name begins like the other's."""
    jobs = {"digits": 1000, "digits-2": 2000}
    whole = open_bucket(bucket_url)
    places = {job: whole.at(layout.checkpoints(job)) for job in jobs}
    for place in places.values():
        place.put("1-r0.dead-0/00000-0000", b"of a round that died")
    with ExitStack() as stack:
        for place in places.values():
            stack.enter_context(read_meanwhile(place.url))
        worlds = [
            stack.enter_context(Ranks(2, named_steps.save_steps, place.url, range(1, 7), jobs[job]))
            for job, place in places.items()
        ]
        for world in worlds:
            assert [(end.code, end.value) for end in world.wait()] == [(0, None)] * 2
    for job, place in places.items():
        (entry,) = committed(place)
        assert (entry.step, entry.round) == (6, 1)
        assert objects(place) == needed_by(place, [entry])
        assert not torn(place)
        assert run(1, named_steps.save_steps, place.url, [], jobs[job]) == [6]
    mine, others = places.values()
    kept = {item.key: item.tag for item in others.list("")}
    deletion.remove(whole, "digits", listing.committed(whole, "digits"))
    assert objects(mine) == set()
    assert {item.key: item.tag for item in others.list("")} == kept
