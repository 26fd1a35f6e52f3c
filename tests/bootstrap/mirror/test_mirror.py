"""Files that real workers write, in real buckets: kept whole or not at all, and back on the next node."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.mirror import mirror
from gpuctl.bootstrap.mirror.mirror import QUIET, Mirror
from gpuctl.bootstrap.mirror.watched_folder import FileStamp, WatchedFolder
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import BadInput, CorruptRecord, Fenced
from gpuctl.cluster.records.rounds import Member, Round
from gpuctl.cluster.records.snapshots import Snapshot
from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.marks import STORES
from tests.waiting import PATIENCE_S, until

JOB = "job-1"
QUICK = {QUIET: "0.3"}

_OBEDIENT = """
import os, sys
from tests.waiting import PATIENCE_S
os.chdir(sys.argv[1])
for line in sys.stdin:
    exec(line.replace(r"\\n", "\\n"))
    print("done", flush=True)
"""


class Worker:
    """A process that does what it is told, in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OBEDIENT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def do(self, code: str) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(code + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n", code

    def kill(self, *, reap: bool = True) -> None:
        self._process.kill()
        if reap:
            self._process.wait(10)

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait(10) == 0


class Later(SystemClock):
    """Runs ahead by as much as it is told."""

    ahead = 0.0
    leap = 0.0
    """What each look at it adds."""

    def monotonic(self) -> float:
        self.ahead += self.leap
        return super().monotonic() + self.ahead


class Scanned(WatchedFolder):
    """Counts how often it was looked through."""

    scans = 0

    def scan(self) -> dict[str, FileStamp]:
        self.scans += 1
        return super().scan()


class Node:
    """One node's part: its folder, and a mirror and a worker for each round."""

    def __init__(self, name: str, folder: Path, store: Bucket) -> None:
        self.name = name
        self.path = folder / name / "checkpoints"
        self.said: list[str] = []
        self.clock = Later()
        self._folder = Scanned(self.path)
        self._store = store
        self.worker: Worker | None = None

    def restore(self, number: int, *others: Node, rank: int = 0) -> None:
        members = [Member(node=n.name, incarnation="i", address="127.0.0.1", nproc=1) for n in others]
        members.insert(rank, Member(node=self.name, incarnation="i", address="127.0.0.1", nproc=1))
        round_ = Round(job=JOB, number=number, phase="run", epoch=1, members=tuple(members))
        self.mirror = Mirror(self._store, self._folder, round_, rank, self.clock, self.said.append)
        self.mirror.restore(QUICK)

    def begin(self, number: int, *others: Node, rank: int = 0) -> Worker:
        self.restore(number, *others, rank=rank)
        worker = self.worker = Worker(self.path)
        self.mirror.watch(lambda: [worker.pid])
        return worker

    def waits(self, seconds: float) -> None:
        """So much time goes by; what the mirror makes of that, and of what was written before, it has made."""
        self.looks(2)
        self.clock.ahead += seconds
        self.looks(2)

    def looks(self, times: int) -> None:
        """The last one begins when those before it are over, with the sets that came of them."""
        wanted = self._folder.scans + times
        until(lambda: self._folder.scans >= wanted, "the mirror to look")

    def end(self) -> str:
        """The worker ends well."""
        assert self.worker
        self.worker.end()
        return self.mirror.finish(whole=True)

    def leave(self) -> None:
        if self.worker:
            self.worker.kill()
            self.mirror.hurry()
            self.mirror.finish(whole=False)

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.path)): path.read_text() for path in self.path.rglob("*") if not path.is_dir()
        }


@pytest.fixture(params=STORES)
def bucket_url(request: pytest.FixtureRequest) -> str:
    """On a folder for every change, on the servers where all is run."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def store(bucket_url: str) -> Bucket:
    return open_bucket(bucket_url)


@pytest.fixture
def make(tmp_path: Path, store: Bucket) -> Iterator[Callable[[str], Node]]:
    made: list[Node] = []

    def make_node(name: str) -> Node:
        made.append(Node(name, tmp_path, store))
        return made[-1]

    yield make_node
    for node in made:
        node.leave()


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is still is looked at as often as one that is not: tests wait for looks."""
    monkeypatch.setattr(mirror, "_CLEAN_TURN_S", mirror._BUSY_TURN_S)


@pytest.fixture
def alone(tmp_path: Path, file_url: str) -> Iterator[tuple[Node, Bucket]]:
    """A node and its bucket, which is a folder."""
    store = open_bucket(file_url)
    node = Node("a", tmp_path, store)
    yield node, store
    node.leave()


def wait_for_set(store: Bucket, condition: Callable[[Snapshot], Any], timeout: float = PATIENCE_S) -> Snapshot:
    deadline = time.monotonic() + timeout
    while True:
        newest = snapshot_log.newest(store, JOB)
        if newest and condition(newest):
            return newest
        assert time.monotonic() < deadline, newest
        time.sleep(0.02)


def wait_for_text(store: Bucket, path: str, text: str) -> None:
    wait_for_set(store, lambda newest: text_of(store, path, newest) == text)


def text_of(store: Bucket, path: str, of: Snapshot | None = None) -> str | None:
    """What the newest set has at ``path``."""
    newest = of or snapshot_log.newest(store, JOB)
    if newest is None or path not in newest.files:
        return None
    data = store.get(f"jobs/{JOB}/files/blobs/{newest.files[path].blob}")
    return None if data is None else data.decode()


def write(path: str, text: str) -> str:
    return f"open({path!r}, 'w').write({text!r})"


def test_a_file_at_rest_is_kept_and_back_on_another_node_before_its_workers_start(
    make: Callable[[str], Node], store: Bucket
) -> None:
    a, b = make("a"), make("b")
    a.begin(1).do("os.makedirs('deep/er'); " + write("deep/er/model.pt", "one") + "; os.symlink('deep', 'newest')")
    wait_for_set(store, lambda s: "deep/er/model.pt" in s.files)
    a.worker.kill()  # type: ignore[union-attr]

    b.restore(2)

    assert b.files()["deep/er/model.pt"] == "one"
    assert (b.path / "newest").readlink() == Path("deep")
    assert (b.path / "deep/er/model.pt").stat().st_mtime_ns == (a.path / "deep/er/model.pt").stat().st_mtime_ns


@pytest.mark.slow
def test_no_file_is_kept_while_one_is_open_for_writing(make: Callable[[str], Node], store: Bucket) -> None:
    a = make("a")
    worker = a.begin(1)
    worker.do(write("marker", "one"))
    wait_for_set(store, lambda s: "marker" in s.files)

    worker.do("file = open('optimizer', 'w'); file.write('half'); file.flush(); " + write("model", "one"))
    a.waits(1.5)  # five times as long as files need to be at rest
    newest = snapshot_log.newest(store, JOB)
    assert newest and set(newest.files) == {"marker"}

    worker.do("file.write(' whole'); file.close()")
    wait_for_set(store, lambda s: set(s.files) == {"marker", "model", "optimizer"})
    assert text_of(store, "optimizer") == "half whole"


@pytest.mark.slow
@pytest.mark.parametrize("told", ["at once", "late"])
def test_a_file_cut_off_by_a_kill_never_replaces_the_whole_one(
    make: Callable[[str], Node], store: Bucket, told: str
) -> None:
    a = make("a")
    worker = a.begin(1)
    worker.do(write("model", "whole"))
    wait_for_set(store, lambda s: "model" in s.files)

    worker.do("file = open('model', 'w'); file.write('ha'); file.flush()")
    worker.kill(reap=told == "at once")
    if told == "late":  # the launcher may take its time with the other workers
        a.waits(2.0)
    a.mirror.finish(whole=False)
    assert text_of(store, "model") == "whole"

    a.restore(2)
    assert a.files() == {"model": "whole"}
    assert (a.path.with_name("checkpoints.aside") / "model").read_text() == "ha"


def test_what_workers_that_end_well_wrote_last_is_kept_at_once(make: Callable[[str], Node], store: Bucket) -> None:
    a = make("a")
    a.begin(1).do(write("model", "last") + "; log = open('run.log', 'w'); log.write('x'); log.flush()")
    assert a.end() == ""
    assert text_of(store, "model") == "last" and text_of(store, "run.log") == "x"


def test_a_log_that_is_written_all_the_time_holds_nothing_back(make: Callable[[str], Node], store: Bucket) -> None:
    a = make("a")
    worker = a.begin(1)
    worker.do("log = open('events.out.tfevents.1', 'w'); log.write('x'); log.flush(); " + write("model", "one"))
    wait_for_set(store, lambda s: set(s.files) == {"model"})


def test_a_file_that_is_replaced_all_the_time_is_kept_all_the_same(make: Callable[[str], Node], store: Bucket) -> None:
    a = make("a")
    worker = a.begin(1)
    deadline = time.monotonic() + 20
    while not snapshot_log.newest(store, JOB):
        worker.do(write("m.tmp", "whole") + "; os.replace('m.tmp', 'm'); import time; time.sleep(0.05)")
        assert time.monotonic() < deadline
    assert text_of(store, "m") == "whole"


def come_and_go(node: Node) -> None:
    """A file comes, the mirror sees it and waits for it to be at rest, and it is removed; then all is still."""
    assert node.worker
    node.worker.do(write("probe", "x"))
    node.looks(2)
    node.worker.do("os.remove('probe')")
    node.waits(2.5)


@pytest.mark.slow
def test_a_file_that_came_and_went_takes_no_patience_from_the_next_checkpoint(alone: tuple[Node, Bucket]) -> None:
    node, store = alone
    worker = node.begin(1)
    worker.do(write("model", "1") + "; " + write("optimizer", "1"))
    wait_for_text(store, "optimizer", "1")
    come_and_go(node)
    node.clock.ahead += 700  # training, and no change in the folder
    worker.do(write("model", "2") + "; file = open('optimizer', 'r+')")
    node.waits(1.5)
    assert text_of(store, "model") == "1", "the other half is open"
    worker.do("file.write('2'); file.close()")
    wait_for_text(store, "optimizer", "2")
    assert text_of(store, "model") == "2"


@pytest.mark.slow
def test_a_file_that_came_and_went_does_not_count_as_removed_for_ever(alone: tuple[Node, Bucket]) -> None:
    node, store = alone
    worker = node.begin(1)
    worker.do(write("model", "1"))
    wait_for_text(store, "model", "1")
    come_and_go(node)
    worker.do(write("last.ckpt", "whole") + "; import itertools, time; number = itertools.count()")
    deadline = time.monotonic() + 20
    while not (newest := snapshot_log.newest(store, JOB)) or "last.ckpt" not in newest.files:
        worker.do(write("new.tmp", "x") + "; os.rename('new.tmp', f'{next(number)}.png'); time.sleep(0.05)")
        assert time.monotonic() < deadline
    youngest = max(file.modified_ns for file in newest.files.values()) / 1e9
    assert newest.at - youngest > 0.25, "nothing was removed since the last set, so what is not at rest is left out"


@pytest.mark.slow
def test_a_file_that_is_open_for_too_long_stays_as_the_set_before_had_it(alone: tuple[Node, Bucket]) -> None:
    node, store = alone
    worker = node.begin(1)
    worker.do(write("model", "1") + "; " + write("table", "1"))
    wait_for_text(store, "table", "1")
    worker.do(write("model", "2") + "; file = open('table', 'r+'); file.write('half'); file.flush()")
    node.waits(700.0)
    wait_for_text(store, "model", "2")
    assert text_of(store, "table") == "1"


def test_logs_that_change_while_they_are_copied_hold_nothing_back(alone: tuple[Node, Bucket]) -> None:
    node, store = alone
    worker = node.begin(1)
    worker.do("import threading, time; going_on = True; open('log.csv', 'w').truncate(60_000_000)")  # slow to read
    worker.do(
        r"def log():\n while going_on:\n  with open('log.csv', 'a') as file: file.write('x')\n  time.sleep(0.001)"
    )
    worker.do("logging = threading.Thread(target=log, daemon=True); logging.start()")
    worker.do(write("model", "one"))
    wait_for_set(store, lambda s: "model" in s.files)
    worker.do("going_on = False; logging.join()")
    size = (node.path / "log.csv").stat().st_size
    wait_for_set(store, lambda s: "log.csv" in s.files and s.files["log.csv"].size == size)


@pytest.mark.slow
def test_a_checkpoint_that_is_overwritten_while_it_is_copied_makes_no_set_of_two_halves(tmp_path: Path) -> None:
    class Overtaken(Bucket):
        """While the first half of the second checkpoint goes up, the third is written over it, and so on."""

        def put(self, key: str, data: bytes | memoryview) -> None:
            text = bytes(data).decode().strip()
            if "/blobs/" in key and text in following:
                save(following.pop(text))
            super().put(key, data)

    following = {"2": "3", "3": "4"}
    plain = open_bucket((tmp_path / "bucket").as_uri())
    node = Node("a", tmp_path, Overtaken(plain.raw, plain.url))
    worker = node.begin(1)

    def save(text: str) -> None:
        worker.do(write("model", text) + "; " + write("optimizer", text + " "))

    save("1")
    wait_for_text(plain, "model", "1")
    save("2")
    wait_for_text(plain, "model", "4")
    node.leave()
    versions = [version.value for version in ledgers.files(plain, JOB).history()]
    halves = {text: hashlib.sha256(text.encode()).hexdigest() for text in ("1", "1 ", "4", "4 ")}
    assert {
        (one.files["model"].sha256, one.files["optimizer"].sha256) for log in versions if log for one in log.sets
    } == {(halves["1"], halves["1 "]), (halves["4"], halves["4 "])}
    said = [line for line in node.said if "cannot save the checkpoint folder yet" in line]
    assert len(said) == 1 and "changed while it was read" in said[0], "once until a set is made"


def leave_behind(worker: Worker, name: str, size: int, as_long_as: str) -> int:
    """A process that the worker starts, and that writes to a file without a pause; it knows ``end``, 3 s from now.

    The file has ``size`` bytes from the start, so that some of this falls within the reading of it. Returns the pid.
    """
    code = "import os, time; file = os.open('x.tmp', os.O_WRONLY | os.O_CREAT | os.O_APPEND); "
    code += f"os.truncate(file, {size}); os.rename('x.tmp', {name!r}); end = time.time() + 3; "
    code += f"all(os.write(file, b'x') and {as_long_as} for _ in iter(int, 1))"
    worker.do(f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {code!r}])")
    worker.do(f"while not os.path.exists({name!r}): time.sleep(0.01)")
    worker.do("open('../child', 'w').write(str(child.pid))")
    return int((worker.folder.parent / "child").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["upload.log", "upload"])
def test_what_outlives_the_workers_and_still_writes_does_not_take_the_last_set_unsaid(
    alone: tuple[Node, Bucket], name: str
) -> None:
    node, store = alone
    worker = node.begin(1)
    child = leave_behind(worker, name, 300_000_000, "True")
    try:
        worker.do(write("final.pt", "the result"))
        node.clock.leap = 5.0
        lost = node.end()
    finally:
        os.kill(child, signal.SIGKILL)
    if name == "upload":
        assert lost == "upload changed while it was read"
        assert snapshot_log.newest(store, JOB) is None, "whole or absent"
    else:
        assert lost == ""
        assert text_of(store, "final.pt") == "the result"
        assert node.said[-1].endswith("the last snapshot lacks the end of upload.log, still being written")


@pytest.mark.slow
def test_what_outlives_the_workers_has_time_to_end_what_it_writes(alone: tuple[Node, Bucket]) -> None:
    node, store = alone
    worker = node.begin(1)
    leave_behind(worker, "copy", 50_000_000, "time.time() < end")
    assert node.end() == ""
    newest = snapshot_log.newest(store, JOB)
    assert newest and newest.files["copy"].size == (node.path / "copy").stat().st_size


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_is_not_taken_for_removed(alone: tuple[Node, Bucket]) -> None:
    node, store = alone
    worker = node.begin(1)
    below = "/".join(["d", *["x" * 200] * 19])
    worker.do(f"os.makedirs({below!r}); " + write(f"{below}/model", "one"))
    before = wait_for_set(store, lambda s: f"{below}/model" in s.files)
    # The kernel takes no path of more than 4096 bytes, and shows what lies there to nobody who names it in one.
    worker.do(f"os.rename('d', {'d' * 250!r}); " + write("state.json", "1"))
    node.waits(1.5)
    assert snapshot_log.newest(store, JOB) == before
    assert "cannot save the checkpoint folder yet" in node.said[-1] and "File name too long" in node.said[-1]
    assert "File name too long" in node.end()


def test_a_stream_of_new_files_does_not_keep_a_checkpoint_from_the_bucket(
    make: Callable[[str], Node], store: Bucket
) -> None:
    a, b = make("a"), make("b")
    worker = a.begin(1)
    worker.do(write("last.ckpt", "whole") + "; import itertools, time; number = itertools.count()")
    deadline = time.monotonic() + 20
    while text_of(store, "last.ckpt") is None:
        worker.do(write("new.tmp", "x") + "; os.rename('new.tmp', f'{next(number)}.png'); time.sleep(0.05)")
        assert time.monotonic() < deadline
    worker.kill()
    a.mirror.finish(whole=False)
    b.restore(2)
    assert b.files()["last.ckpt"] == "whole"


def test_a_script_that_keeps_its_newest_file_only_finds_it_on_the_next_node(
    make: Callable[[str], Node], store: Bucket
) -> None:
    a, b = make("a"), make("b")
    worker = a.begin(1)
    worker.do(write("0.pt", "whole") + "; import time; number = 0")
    deadline = time.monotonic() + 20
    while not (newest := snapshot_log.newest(store, JOB)) or "0.pt" in newest.files:
        worker.do(write("new.tmp", "whole") + "; os.rename('new.tmp', f'{number + 1}.pt'); os.remove(f'{number}.pt')")
        worker.do("number += 1; time.sleep(0.1)")
        assert time.monotonic() < deadline, newest
    worker.kill()
    a.mirror.finish(whole=False)
    b.restore(2)
    assert list(b.files().values()) == ["whole"]


def test_names_of_unfinished_files_are_in_no_set(make: Callable[[str], Node], store: Bucket) -> None:
    a = make("a")
    worker = a.begin(1)
    worker.do("os.makedirs('tmp-checkpoint-5')")
    for name in ("m.tmp", "m.pt.partial", "m.tmp.123", ".tmp_x", "tmp-checkpoint-5/m", ".metadata"):
        worker.do(write(name, "x"))
    assert a.end() == ""
    newest = snapshot_log.newest(store, JOB)
    assert newest and set(newest.files) == {".metadata"}


def test_a_set_has_what_every_node_wrote_and_the_lower_rank_wins(make: Callable[[str], Node]) -> None:
    a, b = make("a"), make("b")
    a.begin(1, b).do(write("both", "a") + "; " + write("of-a", "1"))
    b.begin(1, a, rank=1).do(write("both", "b") + "; " + write("of-b", "1"))
    assert (b.end(), a.end()) == ("", "")

    a.begin(2, b).do(write("of-a", "2"))
    b.begin(2, a, rank=1).do(write("of-b", "2") + "; os.remove('both')")
    assert a.files() == {"both": "a", "of-a": "2", "of-b": "1"}, "everything is on every node"
    assert (b.end(), a.end()) == ("", "")

    c = make("c")
    c.restore(3)
    assert c.files() == {"of-a": "2", "of-b": "2"}, "a copy from before hides neither a change nor a removal"


def test_an_agent_of_an_older_round_keeps_nothing_any_more(make: Callable[[str], Node], store: Bucket) -> None:
    a, b = make("a"), make("b")
    a.begin(1).do(write("model", "one"))
    wait_for_set(store, lambda s: "model" in s.files)
    b.begin(2)
    assert a.worker
    a.worker.do(write("model", "of a zombie"))
    assert a.end() == ""
    assert text_of(store, "model") == "one"
    with pytest.raises(Fenced):
        a.restore(1)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_file_is_named_and_the_next_round_begins_with_the_set_before(
    make: Callable[[str], Node], store: Bucket, damage: str
) -> None:
    a, b = make("a"), make("b")
    worker = a.begin(1)
    worker.do(write("model", "one") + "; " + write("same", "same"))
    wait_for_set(store, lambda s: "model" in s.files)
    worker.do(write("model", "two"))
    two = wait_for_set(store, lambda s: text_of(store, "model", s) == "two")
    key = f"jobs/{JOB}/files/blobs/{two.files['model'].blob}"
    if damage == "missing":
        store.delete([key])
    else:
        store.put(key, b"twO" if damage == "flipped" else b"tw")

    with pytest.raises(Fenced, match="the previous snapshot"):
        b.restore(2)
    assert key in b.said[0]
    b.restore(3)
    assert b.files() == {"model": "one", "same": "same"}


def test_a_blob_that_comes_damaged_once_is_fetched_again(
    make: Callable[[str], Node], store: Bucket, tmp_path: Path
) -> None:
    class Flipping(Bucket):
        times = 1

        def get_range(self, key: str, start: int, end: int) -> memoryview:
            data = bytes(super().get_range(key, start, end))
            if "/blobs/" in key and self.times:
                self.times -= 1
                data = bytes([data[0] ^ 1]) + data[1:]
            return memoryview(data)

    a = make("a")
    a.begin(1).do(write("model", "one"))
    wait_for_set(store, lambda s: "model" in s.files)
    flipping = Flipping(store.raw, store.url)
    b = Node("b", tmp_path, flipping)
    b.restore(2)
    assert flipping.times == 0
    assert b.files() == {"model": "one"}


def test_a_job_whose_only_set_is_damaged_fails_and_keeps_it(make: Callable[[str], Node], store: Bucket) -> None:
    a, b = make("a"), make("b")
    a.begin(1).do(write("model", "one"))
    wait_for_set(store, lambda s: "model" in s.files)
    newest = snapshot_log.newest(store, JOB)
    assert newest
    store.put(f"jobs/{JOB}/files/blobs/{newest.files['model'].blob}", b"onE")
    with pytest.raises(CorruptRecord, match="no snapshot without it"):
        b.restore(2)
    assert snapshot_log.newest(store, JOB) == newest


def test_a_node_fetches_only_what_it_does_not_have(make: Callable[[str], Node]) -> None:
    a, b = make("a"), make("b")
    a.begin(1, b).do(write("big", "same") + "; " + write("model", "one"))
    assert a.end() == ""
    b.restore(2, a)
    b.worker = b.begin(3, a)
    b.worker.do(write("model", "two"))
    assert b.end() == ""
    a.restore(4, b)
    assert a.files() == {"big": "same", "model": "two"}
    assert a.said[-1].endswith("has 2 files, 1 of them fetched")


def test_large_files_pass_in_parts(make: Callable[[str], Node]) -> None:
    a, b = make("a"), make("b")
    a.begin(1).do("open('big', 'wb').write(os.urandom(20_000_001)); open('empty', 'wb').close()")
    assert a.end() == ""
    b.restore(2)
    assert (b.path / "big").read_bytes() == (a.path / "big").read_bytes()
    assert (b.path / "empty").read_bytes() == b""


@pytest.mark.slow
def test_only_what_the_last_two_sets_need_stays_in_the_bucket(make: Callable[[str], Node], store: Bucket) -> None:
    a = make("a")
    store.put(f"jobs/{JOB}/files/blobs/{'0' * 64}-r000001-0-9", b"of a dead round")
    worker = a.begin(2)
    for text in ("one", "two", "three", "four"):
        worker.do(write("model", text))
        wait_for_text(store, "model", text)
    assert a.end() == ""
    left = {store.get(entry.key) for entry in store.list(f"jobs/{JOB}/files/blobs")}
    assert left == {b"three", b"four"}


def test_a_round_that_is_ended_while_it_restores_does_not_start(make: Callable[[str], Node], store: Bucket) -> None:
    a, b = make("a"), make("b")
    a.begin(1).do(write("model", "one"))
    assert a.end() == ""

    class Cut(Bucket):
        """Whoever reads from it is told to hurry first."""

        def get_range(self, key: str, start: int, end: int) -> memoryview:
            b.mirror.hurry()
            return super().get_range(key, start, end)

    b._store = Cut(store.raw, store.url)
    with pytest.raises(Fenced, match="stopped while it started"):
        b.restore(2)
    assert b.files() == {}


@pytest.mark.slow
def test_a_folder_that_nobody_writes_to_costs_no_request(tmp_path: Path) -> None:
    requests: list[str] = []

    class Counting(Bucket):
        def get(self, key: str) -> bytes | None:
            requests.append(key)
            return super().get(key)

        def list(self, prefix: str, after: str | None = None) -> Any:
            requests.append(prefix)
            return super().list(prefix, after)

        def create(self, key: str, data: bytes) -> bool:
            requests.append(key)
            return super().create(key, data)

    plain = open_bucket((tmp_path / "bucket").as_uri())
    a = Node("a", tmp_path, Counting(plain.raw, plain.url))
    a.begin(1)
    at_start = len(requests)
    a.looks(3)
    assert len(requests) == at_start <= 5
    assert a.end() == ""
    assert len(requests) == at_start


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "1e9"])
def test_a_quiet_time_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    store = open_bucket((tmp_path / "bucket").as_uri())
    round_ = Round(
        job=JOB,
        number=1,
        phase="run",
        epoch=1,
        members=(Member(node="a", incarnation="i", address="127.0.0.1", nproc=1),),
    )
    mirror = Mirror(store, WatchedFolder(tmp_path / "a"), round_, 0, SystemClock(), print)
    with pytest.raises(BadInput, match=QUIET):
        mirror.restore({QUIET: text})


def test_nothing_outside_of_the_folder_is_written_whatever_the_ledger_says(
    make: Callable[[str], Node], store: Bucket
) -> None:
    a, b = make("a"), make("b")
    a.begin(1).do(write("model", "one") + "; os.symlink('/etc/passwd', 'secret')")
    assert a.end() == ""
    newest = snapshot_log.newest(store, JOB)
    assert newest and set(newest.files) == {"model"}
    sets = snapshot_log.SnapshotLog(store, JOB, 1, 0, SystemClock())
    assert sets.begin() == {}
    assert sets.commit({"../outside": newest.files["model"]}) == []
    with pytest.raises(CorruptRecord, match="outside"):
        b.restore(2)
    assert not os.path.lexists(b.path.parent / "outside")
