"""The thread that saves: what it does first, what it puts off, and what it leaves when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuctl import Checkpointer
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints.commit_log import CommitLog
from gpuctl.cluster.checkpoints.manifest import manifest_key, read_manifest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import GpuctlError, StoreError
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.worker_context import DEADLINE, WorkerContext
from gpuctl.trainers.checkpoint.save.host_buffer import HostBuffer, layout_of
from gpuctl.trainers.checkpoint.save.partition import partition_of
from gpuctl.trainers.checkpoint.save.pending_save import PendingSave
from gpuctl.trainers.checkpoint.save.save_thread import SaveThread
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits, Uploader
from gpuctl.trainers.checkpoint.state.state_tensors import contents_of

_LEFT_OVER = 150


class Odd(BaseException):
    """What nobody has foreseen."""


class Gated(Bucket):
    """Notes commits and deletions in order. Each deletion waits for ``may_delete``, each part for a permit if ``parts``
    is given; ``fault`` is raised instead of writing one."""

    def __init__(self, url: str, parts: threading.Semaphore | None = None) -> None:
        super().__init__(open_bucket(url).raw, url)
        self.noted: list[str] = []
        self.may_delete = threading.Event()
        self.fault: BaseException | None = None
        self._parts = parts

    def put(self, key: str, data: bytes | memoryview) -> None:
        if "/00000-" in key:
            assert self._parts is None or self._parts.acquire(timeout=60)
            if self.fault is not None:
                raise self.fault
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self.noted.append("commit")
        return super().create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        those = list(keys)
        if not all(key.startswith("ledger/") for key in those):
            self.noted.append(f"delete {len(those)}")
            assert self.may_delete.wait(60)
        super().delete(those)

    def is_tidy(self) -> bool:
        """Whether nothing is there but what the log names."""
        entries = self.entries()
        needed = {key for entry in entries for key in read_manifest(self, entry).keys() | {manifest_key(entry)}}
        return {item.key for item in self.list("") if not item.key.startswith("ledger/")} == needed

    def entries(self) -> Any:
        log = ledgers.checkpoints_in(self).read().value
        return log.entries if log else ()

    def is_at(self, step: int) -> bool:
        return self.steps() == [step]

    def steps(self) -> list[int]:
        return [entry.step for entry in self.entries()]


@pytest.fixture
def littered(file_url: str) -> Gated:
    """A bucket in which a dead round has left so much that it takes three lists of keys to delete it."""
    store = Gated(file_url)
    for number in range(_LEFT_OVER):
        store.put(f"7-r0.dead-0/{number:05d}", b"left")
    return store


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_save_counts_before_old_ones_are_deleted_and_the_next_breaks_that_off(littered: Gated) -> None:
    checkpointer = Checkpointer(store=littered, keep=1)
    checkpointer.save(1, {"step": 1})
    checkpointer.wait(60)  # committed, though nothing can be deleted yet
    wait_until(lambda: "delete 64" in littered.noted)
    checkpointer.save(2, {"step": 2})
    littered.may_delete.set()
    checkpointer.wait()
    of_step_1 = littered.noted.pop()
    assert littered.noted == ["commit", "commit", "delete 64", "commit", "delete 64", "delete 22"], (
        "a fence comes first"
    )
    assert of_step_1 == "delete 2", "its part and its manifest"
    assert littered.is_tidy()


class Opening:
    """A part of the state: from when it is saved on, the store deletes."""

    def __init__(self, store: Gated) -> None:
        self._store = store

    def state_dict(self) -> dict[str, Any]:
        self._store.may_delete.set()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_before_a_deadline_nothing_more_is_deleted_and_the_next_round_makes_up_for_it(
    littered: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = WorkerContext("demo", f"file://{tmp_path}/other", "job-1", 1, "node-0", tmp_path, tmp_path, tmp_path)
    for name, value in context.env().items():
        monkeypatch.setenv(name, value)
    checkpointer = Checkpointer(store=littered, keep=1)
    checkpointer.save(1, {"step": 1})
    wait_until(lambda: "delete 64" in littered.noted)
    (context.round_dir / DEADLINE).write_text(f"{time.monotonic() + 60:.3f}")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        checkpointer.step(2, {"step": 2, "opening": Opening(littered)})
    checkpointer.wait()
    assert littered.noted == ["commit", "commit", "delete 64", "commit"]
    assert littered.steps() == [2]

    later = Checkpointer(store=littered, keep=1)
    later.save(3, {"step": 3})
    later.wait()
    assert littered.steps() == [3]
    assert littered.is_tidy()


def test_saves_that_always_wait_for_each_other_do_not_fill_the_bucket(file_url: str) -> None:
    permits = threading.Semaphore(0)
    store = Gated(file_url, permits)
    store.may_delete.set()
    checkpointer = Checkpointer(store=store, keep=1)
    checkpointer.save(1, {"step": 1})
    for step in range(2, 9):
        checkpointer.save(step, {"step": step})
        permits.release()
        wait_until(partial(store.is_at, step - 1))
    wait_until(lambda: store.noted.count("delete 2") == 3)
    permits.release()
    checkpointer.wait()
    assert store.noted.count("delete 2") == 7
    assert store.is_tidy()


def test_an_error_that_no_one_has_foreseen_fails_the_save_alone(file_url: str) -> None:
    store = Gated(file_url)
    checkpointer, store.fault = Checkpointer(store=store), MemoryError("no more")
    checkpointer.save(1, {"step": 1})
    with pytest.raises(GpuctlError, match=r"step 1 was not written: MemoryError\('no more'\)"):
        checkpointer.wait(60)
    with pytest.raises(GpuctlError, match="step 1 was not written"):
        checkpointer.should_stop(1)
    store.fault = None
    checkpointer.save(2, {"step": 2})
    checkpointer.wait(60)
    assert store.steps() == [2]


def test_when_the_thread_ends_all_that_wait_for_it_hear_why_and_so_does_the_next_save(file_url: str) -> None:
    permits = threading.Semaphore(0)
    store = Gated(file_url, permits)
    checkpointer, store.fault = Checkpointer(store=store), Odd("of a kind")
    checkpointer.save(1, {"step": 1})
    checkpointer.save(2, {"step": 2})
    permits.release()
    why = r"checkpoints are no longer saved: Odd\('of a kind'\)"
    for _ in range(2):
        with pytest.raises(GpuctlError, match=why):
            checkpointer.wait(60)
    with pytest.raises(GpuctlError, match=why):
        checkpointer.save(3, {"step": 3})
    with pytest.raises(GpuctlError, match=why):
        checkpointer.should_stop(3)


def saver_on(store: Gated) -> SaveThread:
    commits = CommitLog(store, 1, Retention())
    commits.begin()
    return SaveThread(1, "mark", commits, Uploader(store, TransferLimits()))


def save_of(step: int) -> PendingSave:
    contents, staging = contents_of({"step": step}, 0), HostBuffer()
    share = partition_of(contents, 0, 1)
    layout = layout_of(share, contents.values)
    return PendingSave(step, "asked", share, layout, staging.fill(layout, contents), staging, {})


_HELD_S = 0.3


def test_what_a_save_takes_is_its_own_time_and_not_that_behind_another_one(file_url: str) -> None:
    permits = threading.Semaphore(0)
    saver = saver_on(Gated(file_url, permits))
    begun = time.monotonic()
    saves = [save_of(1), save_of(2)]
    for save in saves:
        saver.submit(save)
    time.sleep(_HELD_S)
    permits.release(2)
    assert saves[1].done.wait(60)
    assert saver.took_s is not None
    assert saver.took_s <= time.monotonic() - begun - _HELD_S
    saver.rest()


def test_a_save_that_fails_says_nothing_of_what_saves_take(file_url: str) -> None:
    store = Gated(file_url)
    saver = saver_on(store)
    for fault in (None, StoreError("refused")):
        store.fault = fault
        before = saver.took_s
        save = save_of(1 if fault is None else 2)
        saver.submit(save)
        assert save.done.wait(60)
        assert (save.error is None) == (fault is None)
    assert before is not None
    assert saver.took_s == before
    saver.heard()


def test_a_restore_finds_what_is_on_its_way(file_url: str) -> None:
    permits = threading.Semaphore(0)
    checkpointer = Checkpointer(store=Gated(file_url, permits))
    checkpointer.save(1, {"step": 1})
    later = threading.Timer(_HELD_S, permits.release)
    later.start()
    state = {"step": 0}
    assert checkpointer.restore(state) == 1
    assert state == {"step": 1}
    later.join()


_LAST_SAVE = """
import sys, threading
from gpuctl import Checkpointer
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.errors import GpuctlError, StoreError

class Refusing(Bucket):
    def put(self, key, data):
        if sys.argv[2] == "later":
            threading.main_thread().join()
        raise StoreError("the bucket refuses it")

checkpointer = Checkpointer(store=Refusing(open_bucket(sys.argv[1]).raw, sys.argv[1]), every=1)
checkpointer.step(1, {"count": 1})
if sys.argv[2] != "later":
    for thread in threading.enumerate():
        if thread.name == "gpuctl-save":
            thread.join()
try:
    if sys.argv[2] == "waits":
        checkpointer.wait()
    if sys.argv[2] == "steps":
        checkpointer.step(2, {"count": 2})
    if sys.argv[2] == "saves":
        checkpointer.save(2, {"count": 2})
except GpuctlError as error:
    print("told", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told", "steps"),
    [("nothing", 0, [1]), ("later", 0, [1]), ("waits", 1, []), ("steps", 1, []), ("saves", 0, [1, 2])],
)
def test_a_script_that_does_not_ask_what_became_of_a_save_is_told_in_a_line_at_its_end(
    file_url: str, what: str, told: int, steps: list[int]
) -> None:
    """And one that does by an exception alone. ``later``: it fails once the script has ended."""
    done = subprocess.run(
        [sys.executable, "-c", _LAST_SAVE, file_url, what], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told the checkpoint of step 1 was not written: the bucket refuses it") == told
    lines = [f"gpuctl: the checkpoint of step {step} was not written: the bucket refuses it" for step in steps]
    assert done.stderr.splitlines() == lines
