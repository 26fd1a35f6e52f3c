"""The servers that the other tests rest on."""

from __future__ import annotations

import contextlib
import io
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
import pytest

from gpuctl.cluster.errors import StoreError
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests import environment
from tests.fakes.stores import azurite, gcs, s3
from tests.fakes.stores.objects import PAGE, Buckets, Refusal
from tests.fakes.stores.serving import Restarted
from tests.paths import ROOT

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_HOLD_ALL = """
import sys
from contextlib import ExitStack
from tests.fakes.stores import azurite, gcs, s3
with ExitStack() as stack:
    for kind in (s3, gcs, azurite):
        try:
            print(stack.enter_context(kind.serving()), flush=True)
        except azurite.NotInstalled:
            pass
    print("all", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_server_ends_with_its_parent_however_that_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD_ALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as parent:
        assert parent.stdout is not None
        endpoints = [line.strip() for line in iter(parent.stdout.readline, "all\n") if line]
        assert len(endpoints) >= 2
        assert all(_listens(endpoint) for endpoint in endpoints)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(_listens(endpoint) for endpoint in endpoints):
        assert time.monotonic() < deadline, "a server outlived the process that started it"
        time.sleep(0.05)


def _listens(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    with contextlib.suppress(ConnectionError), socket.create_connection((parts.hostname, parts.port or 0), timeout=10):
        return True
    return False


def test_without_azurite_the_reason_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CACHE, str(tmp_path))
    for programs, missing in (({"node"}, "Azurite is not installed"), (set(), "there is no node")):
        path = tmp_path / "-".join(["path", *programs])
        path.mkdir()
        for program in programs:
            (path / program).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(path))
        with pytest.raises(azurite.NotInstalled, match=rf"{missing}.*\.ci/install-system"), azurite.serving():
            pass


# -- Amazon S3, as moto speaks it -------------------------------------------------------------------------------------


def test_the_server_of_s3_meets_one_request_at_a_time() -> None:
    both = threading.Barrier(2)
    met: list[bytes] = []

    def application(request: WSGIEnvironment, _: StartResponse) -> Iterable[bytes]:
        with pytest.raises(threading.BrokenBarrierError):
            both.wait(0.1)  # until another request is here too
        met.append(request["wsgi.input"].read())
        return []

    def ask(body: bytes) -> None:
        request = {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body + b"the next request")}
        served(request, _no_answer)

    served = s3.in_turn(application)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, [b"one", b"two"]))
    assert sorted(met) == [b"one", b"two"]


def _no_answer(*_: object) -> Any:
    raise AssertionError("nothing is answered here")


# -- Google Cloud Storage, as ours speaks it --------------------------------------------------------------------------


def _winners(buckets: Buckets, key: str, generation: int) -> list[bytes]:
    """What those of eight threads, let go at once, have written who were not refused."""
    start = threading.Barrier(8)
    won: list[bytes] = []

    def write(me: int) -> None:
        data = b"%d over %d" % (me, generation)
        start.wait()
        with contextlib.suppress(Refusal):
            buckets.write("b", key, data, generation)
            won.append(data)

    threads = [threading.Thread(target=write, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_of_eight_that_write_on_a_condition_one_wins() -> None:
    buckets = Buckets()
    buckets.create("b")
    for turn in range(50):
        generation = 0
        for _ in range(2):
            won = _winners(buckets, f"k{turn}", generation)
            there = buckets.read("b", f"k{turn}")
            assert won == [there.data]
            generation = there.generation


@pytest.fixture
def bucket(gs_url: str) -> Bucket:
    return open_bucket(gs_url)


def test_a_listing_tells_folders_apart_on_every_page(bucket: Bucket) -> None:
    folders = [f"jobs/{n:02}" for n in range(PAGE + 3)]
    for folder in folders:
        bucket.put(f"{folder}/a", b"1")
        bucket.put(f"{folder}/b", b"1")
    bucket.put("jobs/newest", b"1")
    found = obstore.list_with_delimiter(bucket.raw, "jobs")
    assert list(found["common_prefixes"]) == folders
    assert [there["path"] for there in found["objects"]] == ["jobs/newest"]
    assert len(bucket.list("jobs")) == 2 * len(folders) + 1


def test_a_write_in_parts_is_one_object_with_a_generation_of_its_own(bucket: Bucket) -> None:
    data = bytes(range(256)) * 1000
    first = obstore.put(bucket.raw, "k", data, use_multipart=True, chunk_size=50_000)
    assert bucket.get("k") == data
    second = obstore.put(bucket.raw, "k", data, use_multipart=False)
    assert (
        int(obstore.head(bucket.raw, "k")["version"] or 0) == int(second["version"] or 0) > int(first["version"] or 0)
    )


def test_a_write_in_parts_that_breaks_off_leaves_nothing(bucket: Bucket) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        obstore.put(bucket.raw, "k", chunks(), use_multipart=True, chunk_size=50_000)
    assert bucket.get("k") is None


def test_an_upload_is_made_of_the_parts_it_names() -> None:
    buckets = Buckets()
    buckets.create("b")
    upload = buckets.begin("b")
    parts = {number: buckets.add(upload, number, b"%d" % number).tag for number in (3, 1, 2)}
    with pytest.raises(Refusal, match="parts could not be found"):
        buckets.finish("b", "k", upload, [(1, parts[1]), (4, parts[1])])
    with pytest.raises(Refusal, match="parts could not be found"):
        buckets.finish("b", "k", upload, [(1, parts[2])])
    assert buckets.finish("b", "k", upload, [(1, parts[1]), (3, parts[3])]).data == b"13"
    with pytest.raises(Refusal, match="upload was not found"):
        buckets.abort(upload)


@pytest.mark.slow
def test_what_was_answered_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Restarted(lambda port: gcs.serving(journal, port)) as server:
        gcs.create(server.endpoint, "b")
        bucket = open_bucket(gcs.url(server.endpoint, "b"))
        for key in ("kept", "changed", "deleted"):
            bucket.put(key, key.encode())
        bucket.put("changed", b"since")
        bucket.delete(["deleted"])
        gcs.create(server.endpoint, "gone")
        gcs.delete(server.endpoint, "gone")
        for _ in range(2):
            server.restart()
            with journal.open("a") as file:
                file.write('["b", "unanswered", "')
        server.restart()
        assert bucket.get_many(["kept", "changed", "deleted"]) == [b"kept", b"since", None]
        assert bucket.create("kept", b"2") is False
        assert bucket.create("new", b"1") is True
        assert set(gcs.generations(server.endpoint, "b")) == {f"prefix/{key}" for key in ("kept", "changed", "new")}
        with pytest.raises(StoreError, match="there is no bucket"):
            open_bucket(gcs.url(server.endpoint, "gone")).list("")
