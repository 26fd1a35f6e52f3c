"""The bucket on a folder and on real servers, also through a proxy that spoils exchanges."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import pytest

from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.errors import BadInput, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.bucket_names import SCHEMES
from tests.fakes.faults import FaultyStore, Proxy, Spoil
from tests.fakes.stores import azurite, gcs, s3

_VERBS: dict[str, Callable[[Bucket], object]] = {
    "get": lambda bucket: bucket.get("k"),
    "put": lambda bucket: bucket.put("k", b"1"),
    "create": lambda bucket: bucket.create("k", b"1"),
    "list": lambda bucket: bucket.list("k"),
    "delete": lambda bucket: bucket.delete(["k"]),
    "get_range": lambda bucket: bucket.get_range("k", 0, 1),
    "stream": lambda bucket: list(bucket.stream("k", 0, 1)),
}
_METHODS = ("GET", "PUT", "POST", "DELETE")


class Kind(Protocol):
    """A module of ``tests.fakes.stores``."""

    def create(self, endpoint: str, bucket: str, /) -> None: ...

    def url(self, endpoint: str, bucket: str, secret: str = ..., /) -> str: ...


_SERVERS: dict[str, tuple[str, Kind]] = {
    "s3": ("s3_endpoint", s3),
    "az": ("azurite_endpoint", azurite),
    "gs": ("gcs_endpoint", gcs),
}


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    with Proxy(s3_endpoint).running() as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: Proxy, s3_url: str, s3_endpoint: str) -> Bucket:
    """On S3, behind ``proxy``, with little patience."""
    return open_bucket(s3_url.replace(s3_endpoint, proxy.url), patience_s=0.3, timeout_s=0.8)


@pytest.fixture(params=_SERVERS)
def server(request: pytest.FixtureRequest) -> tuple[Kind, str]:
    """Each kind of server in turn, and where it is."""
    endpoint, kind = _SERVERS[request.param]
    return kind, request.getfixturevalue(endpoint)


@pytest.fixture
def spoiled(server: tuple[Kind, str]) -> Iterator[tuple[Proxy, Bucket]]:
    """A proxy before each kind of server, and a bucket behind it, with little patience."""
    kind, endpoint = server
    name = f"bucket-{uuid.uuid4().hex}"
    kind.create(endpoint, name)
    with Proxy(endpoint).running() as proxy:
        through = proxy.url + urlsplit(endpoint).path
        yield proxy, open_bucket(kind.url(through, name), patience_s=0.3, timeout_s=0.8)


# -- what every bucket does -------------------------------------------------------------------------------------------


def test_a_bucket_keeps_what_is_put_and_lists_it_in_order(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    for key in ("nodes/b.json", "nodes/a.json", "nodes2/c.json", "nodes.json", "nodes/deep/d.json"):
        bucket.put(key, key.encode())
    assert [e.key for e in bucket.list("nodes")] == ["nodes/a.json", "nodes/b.json", "nodes/deep/d.json"]
    assert [e.key for e in bucket.list("nodes", after="nodes/a.json")] == ["nodes/b.json", "nodes/deep/d.json"]
    assert len(bucket.list("")) == 5
    assert bucket.list("nothing") == []
    assert bucket.get("nodes/a.json") == b"nodes/a.json"
    assert bucket.get_many(["nodes/a.json", "no", "nodes.json"]) == [b"nodes/a.json", None, b"nodes.json"]
    assert bytes(bucket.get_range("nodes/a.json", 2, 5)) == b"des"


def test_a_listing_tells_when_an_object_has_changed(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    bucket.put("k", b"one")
    (before,) = bucket.list("")
    bucket.put("k", b"two")
    (after,) = bucket.list("")
    assert (before.size, after.size) == (3, 3)
    assert before.tag != after.tag
    assert abs(after.modified - time.time()) < 60


def test_a_missing_object_is_no_error(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    assert bucket.get("a/b") is None
    bucket.delete(["a/b", "c"])
    with pytest.raises(FileNotFoundError):
        bucket.get_range("a/b", 0, 1)
    with pytest.raises(FileNotFoundError):
        list(bucket.stream("a/b", 0, 1))


@pytest.mark.parametrize("keys", [["k/0"], [f"k/{n}" for n in range(40)], ["k/a&b", "k/ü", "k/a b", "k/<x>"]])
def test_of_many_keys_those_that_are_there_go_whatever_is_missing(bucket_url: str, keys: list[str]) -> None:
    bucket = open_bucket(bucket_url)
    for missing in (keys[:0], keys[:1], keys[1::3], keys):
        for key in (*keys, "stays"):
            if key not in missing:
                bucket.put(key, b"1")
        bucket.delete(iter(keys))
        assert [e.key for e in bucket.list("")] == ["stays"]


def test_no_keys_are_no_request(proxy: Proxy, bucket: Bucket) -> None:
    bucket.delete([])
    assert proxy.seen == []


def test_a_thousand_keys_are_deleted_in_one_request_and_the_next_in_another(proxy: Proxy, bucket: Bucket) -> None:
    bucket.put("k/00999", b"1")
    bucket.put("k/01000", b"1")
    del proxy.seen[:]
    bucket.delete(f"k/{n:05}" for n in range(1001))
    assert [line.partition(" ")[0] for line in proxy.seen] == ["POST", "POST"]
    assert bucket.list("") == []


def test_a_range_is_cut_where_the_object_ends(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    bucket.put("k", b"012345")
    bucket.put("empty", b"")
    ranges = {(0, 6): b"012345", (2, 3): b"2", (4, 9): b"45", (5, 6): b"5", (6, 7): b"", (9, 12): b""}
    assert {(start, end): bytes(bucket.get_range("k", start, end)) for start, end in ranges} == ranges
    assert {(start, end): b"".join(bucket.stream("k", start, end)) for start, end in ranges} == ranges
    assert bucket.get("empty") == bytes(bucket.get_range("empty", 0, 1)) == b""


def test_a_range_comes_in_pieces_and_whole_also_where_the_connection_breaks(
    bucket: Bucket, proxy: Proxy, s3_url: str
) -> None:
    data = random.Random(0).randbytes(3_000_001)
    open_bucket(s3_url).put("k", data)
    pieces = [bytes(piece) for piece in bucket.stream("k", 1, len(data))]
    assert b"".join(pieces) == data[1:]
    assert len(pieces) > 1
    assert len(proxy.seen) == 1
    proxy.plan("land-cut", "GET", times=2)
    assert b"".join(bucket.stream("k", 0, len(data))) == data
    assert len(proxy.seen) > 2


def test_a_long_listing_is_whole_and_begins_where_it_is_told(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    keys = [f"log/{n:03}" for n in range(25)]
    for key in (*keys, "log2/000", "log"[:2]):
        bucket.put(key, b"1")
    assert [e.key for e in bucket.list("log")] == keys
    for after in ("log", "log/000", "log/0105", "log/011", "log/023", "log/024", "log/1", "m", "a"):
        assert [e.key for e in bucket.list("log", after=after)] == [key for key in keys if key > after]


@pytest.mark.parametrize(
    "key",
    ["a b", "ü/é", "50%", "a%2Fb", "a+b", "a#b", "a?b=c&d", "a~b", "'a'", '"a"', "<&>", "a:b", "[x]", "..a", ".a"],
)
def test_a_key_may_have_any_sign(bucket_url: str, key: str) -> None:
    bucket = open_bucket(bucket_url)
    assert bucket.create(key, key.encode()) is True
    assert bucket.create(key, b"") is False
    assert bucket.get(key) == bytes(bucket.get_range(key, 0, 99)) == key.encode()
    assert [e.key for e in bucket.list("")] == [key]
    bucket.delete([key])
    assert bucket.list("") == []


def test_create_writes_once(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    assert bucket.create("k", b"first") is True
    assert bucket.create("k", b"second") is False
    assert bucket.get("k") == b"first"
    bucket.delete(["k"])
    assert bucket.create("k", b"third") is True


def test_one_of_many_threads_creates_a_key(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    for turn in range(5):
        start = threading.Barrier(8)
        won: list[int] = []

        def race(me: int, key: str = f"k{turn}", start: threading.Barrier = start, won: list[int] = won) -> None:
            start.wait()
            if bucket.create(key, str(me).encode()):
                won.append(me)

        threads = [threading.Thread(target=race, args=(me,)) for me in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [str(me).encode() for me in won] == [bucket.get(f"k{turn}")]


def test_a_folder_of_a_bucket_is_a_bucket(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url, patience_s=1.5)
    below = bucket.at("jobs/digits 3").at("logs")
    below.put("k", b"1")
    assert [e.key for e in bucket.list("")] == ["jobs/digits 3/logs/k"]
    assert open_bucket(below.url).get("k") == b"1"


def test_a_probe_leaves_nothing_behind(bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    probe(bucket)
    assert bucket.list("") == []


# -- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "with space", "50% (ü) [x] #1 ?"])
def test_a_file_url_opens_the_folder_it_names(tmp_path: Path, name: str) -> None:
    open_bucket((tmp_path / name).as_uri()).put("k", b"1")
    assert (tmp_path / name / "k").read_bytes() == b"1"


def test_a_file_url_may_have_spaces_as_they_are(tmp_path: Path) -> None:
    open_bucket(f"file://{tmp_path}/a b").at("c d").put("k", b"1")
    assert (tmp_path / "a b" / "c d" / "k").read_bytes() == b"1"


@pytest.mark.parametrize("url", ["file://bucket", "file://./bucket", "file:bucket", "file://", "file://a/b"])
def test_a_relative_file_url_is_refused_with_the_absolute_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=f"did you mean file://{tmp_path}"):
        open_bucket(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("bucket", "is not a bucket URL"),
        ("/tmp/bucket", "is not a bucket URL"),
        ("http://bucket/p", "is not a bucket URL"),
        ("s3:///prefix", "names no bucket; write it as s3://BUCKET/PREFIX"),
        ("s3://bucket/p?nonsense=1", "cannot open the bucket"),
        ("s3://bucket/p?nonsense", "cannot open the bucket"),
        ("s3://bucket/p#1", "write it as %23"),
        ("gs://bucket/p?bearer_token=a%0Ab", "a character that is not allowed in a header"),
        ("gs://bucket/p?bearer_token=%C3%BC", "a character that is not allowed in a header"),
        ("file:///tmp/a?b", "write it as %3F"),
        ("file:///tmp/a#b", "write it as %23"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        open_bucket(url)


def test_every_scheme_opens_without_the_network(tmp_path: Path) -> None:
    options = {"az": "?account_name=a&account_key=a2V5", "s3": "?region=us-east-1"}
    places = {"file": f"{tmp_path}", "memory": ""}
    for scheme in SCHEMES:
        open_bucket(f"{scheme}://{places.get(scheme, 'bucket/prefix')}{options.get(scheme, '')}")


def test_the_scheme_of_a_url_may_be_written_in_capitals(tmp_path: Path) -> None:
    assert open_bucket("S3://bucket/p?region=us-east-1").url == "s3://bucket/p?region=us-east-1"
    assert open_bucket(f"FILE://{tmp_path}").url == f"file://{tmp_path}"


def test_a_memory_bucket_has_no_folder_that_opens() -> None:
    with pytest.raises(BadInput, match="cannot be opened twice"):
        open_bucket("memory://").at("a")


def test_a_key_that_cannot_be_one_is_refused(bucket_url: str) -> None:
    with pytest.raises(StoreError, match=r"'\.\./k' cannot be a key"):
        open_bucket(bucket_url).put("../k", b"1")


# -- a store that refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", _VERBS)
@pytest.mark.parametrize(
    ("status", "code", "word"),
    [
        (403, "AccessDenied", "refuses"),
        (403, "InvalidAccessKeyId", "refuses"),
        (401, "Unauthorized", "refuses"),
        (404, "NoSuchBucket", "there is no bucket"),
        (400, "AuthorizationHeaderMalformed", "does not accept"),
        (301, "PermanentRedirect", "in another region"),
    ],
)
def test_a_refusal_is_told_at_once(proxy: Proxy, bucket: Bucket, verb: str, status: int, code: str, word: str) -> None:
    for method in _METHODS:
        proxy.plan("refuse", method, times=99, status=status, code=code)
    with pytest.raises(StoreError, match=word) as caught:
        _VERBS[verb](bucket)
    assert code in caught.value.message if status != 301 else "?region=" in caught.value.hint
    assert "secret_access_key" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(proxy.seen) == 1


def test_a_bucket_that_does_not_exist_is_named(server: tuple[Kind, str]) -> None:
    kind, endpoint = server
    url = kind.url(endpoint, "no-such-bucket")
    bucket = open_bucket(url, patience_s=1.0)
    for verb in (*_VERBS.values(), probe):
        with pytest.raises(StoreError, match=f"there is no bucket {url.partition('?')[0]}: ") as caught:
            verb(bucket)
        assert "\n" not in str(caught.value)


def test_a_container_that_is_being_deleted_is_none_and_nobody_won_there(proxy: Proxy, bucket: Bucket) -> None:
    proxy.plan("refuse", "PUT", times=2, status=409, code="ContainerBeingDeleted")
    for write in (bucket.put, bucket.create):
        with pytest.raises(StoreError, match=r"there is no bucket .*: ContainerBeingDeleted"):
            write("k", b"1")


@pytest.mark.parametrize(("fixture", "kind"), [("azurite_endpoint", azurite), ("gcs_endpoint", gcs)])
def test_wrong_credentials_are_told_in_one_line(request: pytest.FixtureRequest, fixture: str, kind: Kind) -> None:
    """Moto believes everybody."""
    endpoint, name = request.getfixturevalue(fixture), f"bucket-{uuid.uuid4().hex}"
    kind.create(endpoint, name)
    bucket = open_bucket(kind.url(endpoint, name, "YWFhYQ=="), patience_s=1.0)
    for verb in (*_VERBS.values(), probe):
        with pytest.raises(StoreError, match=r"refuses '(k|probe/\w+)': Auth\w+, .*; check its credentials") as caught:
            verb(bucket)
        assert "\n" not in str(caught.value)
        assert "YWFhYQ" not in str(caught.value)


def test_a_clock_that_is_off_is_told(proxy: Proxy, bucket: Bucket) -> None:
    proxy.plan("refuse", "PUT", status=403, code="RequestTimeTooSkewed")
    with pytest.raises(StoreError, match=r"refuses 'k': RequestTimeTooSkewed.*; set this machine's clock"):
        bucket.put("k", b"1")


def test_credentials_that_may_not_delete_on_azure_are_told(azurite_endpoint: str) -> None:
    """Azure answers to a batch of one, and what it says of that one stands within."""
    name = f"bucket-{uuid.uuid4().hex}"
    azurite.create(azurite_endpoint, name)
    bucket = open_bucket(azurite.shared_url(azurite_endpoint, name, may="rcwl"), patience_s=1.0)
    bucket.put("k", b"1")
    with pytest.raises(StoreError, match=r"refuses 'k': .*not authorized"):
        bucket.delete(["k"])
    assert bucket.get("k") == b"1"


# -- a store that stumbles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", _VERBS)
@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests")])
def test_a_busy_store_is_asked_again(spoiled: tuple[Proxy, Bucket], verb: str, status: int, code: str) -> None:
    proxy, impatient = spoiled
    bucket = open_bucket(impatient.url)
    bucket.put("k", b"1")
    for method in _METHODS:
        proxy.plan("refuse", method, times=1, status=status, code=code)
    _VERBS[verb](bucket)


@pytest.mark.parametrize("verb", _VERBS)
def test_a_store_that_has_an_accident_is_asked_again(proxy: Proxy, bucket: Bucket, verb: str) -> None:
    bucket = open_bucket(bucket.url)  # with the usual patience
    bucket.put("k", b"1")
    for method in _METHODS:
        proxy.plan("refuse", method, times=1, status=500, code="InternalError")
    _VERBS[verb](bucket)


@pytest.mark.timing
@pytest.mark.parametrize("verb", _VERBS)
def test_a_store_that_stays_busy_is_unavailable_when_patience_ends(proxy: Proxy, bucket: Bucket, verb: str) -> None:
    for method in _METHODS:
        proxy.plan("refuse", method, times=999)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="did not answer for 'k': SlowDown"):
        _VERBS[verb](bucket)
    assert 0.2 < time.monotonic() - began < 6


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_is_no_defeat(proxy: Proxy, bucket: Bucket, code: str) -> None:
    proxy.plan("refuse", "PUT", times=2, status=409, code=code)
    assert bucket.create("k", b"1") is True
    assert bucket.get("k") == b"1"


def test_a_conflict_that_stays_is_unavailable(proxy: Proxy, bucket: Bucket) -> None:
    proxy.plan("refuse", "PUT", times=99, status=409, code="ConditionalRequestConflict")
    with pytest.raises(StoreUnavailable, match="ConditionalRequestConflict"):
        bucket.create("k", b"1")
    with pytest.raises(StoreUnavailable, match="ConditionalRequestConflict"):
        bucket.put("k", b"1")


def test_azures_conflict_is_a_defeat(proxy: Proxy, bucket: Bucket) -> None:
    proxy.plan("refuse", "PUT", status=409, code="BlobAlreadyExists")
    assert bucket.create("k", b"1") is False


@pytest.mark.parametrize(
    ("status", "code"), [(400, "BadDigest"), (400, "XAmzContentSHA256Mismatch"), (400, "Md5Mismatch")]
)
def test_what_arrives_otherwise_than_it_was_sent_is_sent_again(
    proxy: Proxy, bucket: Bucket, status: int, code: str
) -> None:
    for write in (bucket.put, bucket.create):
        proxy.plan("refuse", "PUT", times=3, status=status, code=code)
        write("k" if write == bucket.put else "new", b"1")
    assert bucket.get_many(["k", "new"]) == [b"1", b"1"]


def test_what_never_arrives_as_it_was_sent_is_named(proxy: Proxy, bucket: Bucket) -> None:
    proxy.plan("refuse", "PUT", times=99, status=400, code="BadDigest", message="The Content-MD5 did not match.")
    for write in (bucket.put, bucket.create):
        with pytest.raises(
            StoreError, match=r"rejects 'parts/7' each time, .*: BadDigest, The Content-MD5 did not match;"
        ):
            write("parts/7", b"1")
    assert 4 <= len(proxy.seen) <= 20


@pytest.mark.parametrize("spoil", ["reset", "land-cut", "land-reset"])
def test_a_broken_connection_is_mended_or_told(spoiled: tuple[Proxy, Bucket], spoil: Spoil) -> None:
    """A read is repeated. Of a conditional put the caller learns that the outcome is open."""
    proxy, bucket = spoiled
    bucket.put("k", b"x" * 200_000)
    proxy.plan(spoil, "GET")
    assert bucket.get("k") == b"x" * 200_000
    fault = proxy.plan(spoil, "PUT")
    try:
        told: bool | str = bucket.create("new", b"1")
    except StoreUnavailable:
        told = "open"
    assert fault.met.is_set()
    found = bucket.get("new")
    if spoil == "reset":
        assert (told, found) in ((True, b"1"), ("open", None))
    else:
        assert found == b"1"


def test_a_body_that_keeps_breaking_is_unavailable(proxy: Proxy, bucket: Bucket) -> None:
    bucket.put("k", b"x" * 200_000)
    proxy.plan("land-cut", "GET", times=999)
    with pytest.raises(StoreUnavailable, match="did not answer for 'k'"):
        bucket.get("k")
    with pytest.raises(StoreUnavailable, match="did not answer for 'k'"):
        list(bucket.stream("k", 0, 200_000))


@pytest.mark.timing
def test_a_read_that_hangs_ends_at_its_time_limit(proxy: Proxy, bucket: Bucket) -> None:
    bucket.put("k", b"1")
    proxy.plan("hold", "GET", times=99)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="it took too long"):
        bucket.get("k")
    assert time.monotonic() - began < 8


def test_a_slow_read_arrives(proxy: Proxy, bucket: Bucket) -> None:
    bucket.put("k", b"1")
    fault = proxy.plan("hold", "GET")

    def open_the_gate() -> None:
        fault.met.wait(10)
        fault.gate.set()

    opener = threading.Thread(target=open_the_gate)
    opener.start()
    assert bucket.get("k") == b"1"
    opener.join()
    assert fault.met.is_set()


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["closed port", "full backlog", "no such host"])
def test_an_endpoint_that_cannot_be_reached_is_unavailable_within_the_patience(kind: str) -> None:
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{server.getsockname()[1]}"
        if kind == "full backlog":  # as a firewall that drops packets
            server.listen(0)
            for waiting in (first, second):
                waiting.setblocking(False)
                waiting.connect_ex(server.getsockname())
        elif kind == "no such host":
            host = "nowhere.invalid"
        options = f"endpoint=http://{host}&region=us-east-1&access_key_id=a&secret_access_key=b"
        bucket = open_bucket(f"s3://bucket/p?{options}", patience_s=0.5, timeout_s=1.0)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="the bucket s3://bucket/p did not answer for 'k'"):
            bucket.get("k")
        assert time.monotonic() - began < 8


# -- the probe --------------------------------------------------------------------------------------------------------


def test_a_store_that_ignores_conditions_is_refused(server: tuple[Kind, str]) -> None:
    kind, endpoint = server
    name = f"bucket-{uuid.uuid4().hex}"
    kind.create(endpoint, name)
    with Proxy(endpoint, strip=["If-None-Match", "x-goog-if-generation-match"]).running() as proxy:
        through = proxy.url + urlsplit(endpoint).path
        # With a key, Azure's client signs the condition too.
        bucket = open_bucket(
            azurite.shared_url(through, name, may="racwdl") if kind is azurite else kind.url(through, name)
        )
        assert bucket.create("k", b"1")
        assert bucket.create("k", b"2"), "this proxy was to take the condition away"
        with pytest.raises(StoreError, match="ignores create-only puts"):
            probe(bucket)
        assert [e.key for e in bucket.list("")] == ["k"]


def test_a_probe_that_is_refused_says_why(proxy: Proxy, bucket: Bucket) -> None:
    proxy.plan("refuse", "PUT", status=403, code="AccessDenied")
    with pytest.raises(StoreError, match=r"refuses 'probe/.*AccessDenied"):
        probe(bucket)


def test_a_probe_is_not_misled_by_a_lost_answer(bucket: Bucket, proxy: Proxy) -> None:
    proxy.plan("land-refuse", "PUT")
    probe(bucket)
    store = FaultyStore(bucket)
    store.trouble("create", "retried")
    probe(store)


def test_a_probe_of_a_store_that_does_not_answer_is_no_refusal(bucket: Bucket) -> None:
    store = FaultyStore(bucket)
    store.trouble("create", "lost")
    with pytest.raises(StoreUnavailable):
        probe(store)


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for url in (f"file://{tmp_path}/file", f"file://{tmp_path}/file/below"):
        with pytest.raises(StoreError, match=f"cannot open the folder {tmp_path}/file"):
            open_bucket(url)


def test_a_new_folder_is_for_this_user_alone_and_one_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    open_bucket(shared.as_uri()).put("k", b"1")
    open_bucket((tmp_path / "a" / "new").as_uri()).put("k", b"1")
    below = open_bucket(shared.as_uri()).at("jobs")
    below.put("k", b"1")
    assert [oct(f.stat().st_mode & 0o777) for f in (shared, tmp_path / "a" / "new")] == ["0o755", "0o700"]
    assert (shared / "jobs").stat().st_mode & 0o777 == (tmp_path / "a").stat().st_mode & 0o777, "as the umask has it"


def test_a_file_in_the_place_of_a_keys_folder_is_told(tmp_path: Path) -> None:
    bucket = open_bucket(f"file://{tmp_path}")
    bucket.put("nodes", b"x")
    for write in (bucket.put, bucket.create):
        with pytest.raises(StoreError, match=r"does not accept 'nodes/a': .*Not a directory"):
            write("nodes/a", b"1")


def test_a_folder_that_went_away_comes_back_with_the_next_put(tmp_path: Path) -> None:
    bucket = open_bucket(f"file://{tmp_path}/bucket")
    (tmp_path / "bucket").rmdir()
    assert bucket.list("nodes") == []
    assert bucket.get("nodes/a") is None
    assert bucket.create("nodes/a", b"1")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "gpuctl-test", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_and_loses_nothing(small_disk: Path) -> None:
    bucket = open_bucket(small_disk.as_uri())
    bucket.put("k", b"before")
    for write in (bucket.put, bucket.create):
        with pytest.raises(StoreUnavailable, match=r"is full: .*No space left on device"):
            write("k" if write == bucket.put else "new", bytes(200_000))
    assert bucket.get("k") == b"before"
    assert [e.key for e in bucket.list("")] == ["k"]
    assert [p.name for p in small_disk.iterdir()] == ["k"], "half a file stayed and takes room"


@pytest.mark.slow
def test_a_read_only_folder_refuses_writes_and_still_reads(small_disk: Path) -> None:
    bucket = open_bucket(small_disk.as_uri())
    bucket.put("k", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for verb in ("put", "create", "delete"):
        with pytest.raises(StoreError, match=r"refuses 'k': .*Read-only file system"):
            _VERBS[verb](bucket)
    assert bucket.get("k") == b"1"


@pytest.mark.slow
def test_a_folder_without_permission_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    folder.mkdir()
    if os.geteuid() == 0:
        lock, unlock = ["chattr", "+i", str(folder)], ["chattr", "-i", str(folder)]
    else:
        lock, unlock = ["chmod", "a-w", str(folder)], ["chmod", "u+w", str(folder)]
    locked = subprocess.run(lock, capture_output=True, text=True, check=False)
    if locked.returncode:
        pytest.skip(f"a folder cannot be locked here: {locked.stderr.strip()}")
    try:
        with pytest.raises(StoreError, match=r"refuses 'k': .*(Operation not permitted|Permission denied)"):
            open_bucket(folder.as_uri()).put("k", b"1")
    finally:
        subprocess.run(unlock, check=True)


# -- processes --------------------------------------------------------------------------------------------------------

_FORK = """
import os, sys
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.errors import GpuctlError
bucket = open_bucket(sys.argv[1])
if sys.argv[2] == "used":
    bucket.put("k", b"1")
pid = os.fork()
if pid == 0:
    try:
        print(bucket.create("child", b"1"), flush=True)
    except GpuctlError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_fork_of_a_process_that_used_a_bucket_is_told_instead_of_hanging(file_url: str) -> None:
    def forked(parent: str) -> str:
        command = [sys.executable, "-c", _FORK, file_url, parent]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    assert forked("used").startswith(f"StoreError the bucket {file_url} was in use before this process was forked")
    assert forked("unused") == "True\n"


@pytest.mark.parametrize(
    ("status", "code"), [(403, "QuotaExceeded"), (400, "XMinioAdminBucketQuotaExceeded"), (507, "XMinioStorageFull")]
)
def test_a_bucket_that_is_full_may_have_room_again(proxy: Proxy, bucket: Bucket, status: int, code: str) -> None:
    proxy.plan("refuse", "PUT", times=99, status=status, code=code)
    with pytest.raises(StoreUnavailable, match="is full"):
        bucket.put("k", b"")
    proxy.heal()
    bucket.put("k", b"")


def test_every_failure_is_one_line_with_what_to_do(proxy: Proxy, bucket: Bucket) -> None:
    for status, code in ((403, "AccessDenied"), (404, "NoSuchBucket"), (503, "SlowDown"), (507, "Full")):
        proxy.plan("refuse", "GET", times=99, status=status, code=code)
        with pytest.raises(GpuctlError) as caught:
            bucket.get("k")
        assert caught.value.hint
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200
        proxy.heal()
