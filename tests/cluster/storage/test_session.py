"""Credentials that end while a bucket is in use: renewed where that can be, an outage for a while where it cannot."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest

from gpuctl.cluster.errors import StoreError, StoreUnavailable
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.session import StoreSession
from tests.fakes.faults import Proxy
from tests.fakes.stores.identity import KINDS, Identity, Kind


@pytest.fixture
def identity() -> Iterator[Identity]:
    with Identity().running() as identity:
        yield identity


@pytest.fixture
def front(identity: Identity, s3_endpoint: str) -> Iterator[Proxy]:
    """An S3 that takes the keys of ``identity`` alone."""
    with Proxy(s3_endpoint, admits=identity.admits).running() as proxy:
        yield proxy


@pytest.fixture
def keyless(front: Proxy, s3_url: str) -> str:
    """A URL without credentials."""
    return f"{s3_url.partition('?')[0]}?endpoint={front.url}&region=us-east-1"


@pytest.fixture(params=KINDS)
def of_machine(
    request: pytest.FixtureRequest,
    identity: Identity,
    keyless: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Bucket:
    """A bucket that each kind of identity opens."""
    kind: Kind = request.param
    for name, value in identity.env(kind, tmp_path).items():
        monkeypatch.setenv(name, value)
    return open_bucket(keyless, patience_s=0.3, timeout_s=2)


def test_a_key_that_ends_before_its_time_is_replaced_and_the_request_repeated(
    of_machine: Bucket, identity: Identity
) -> None:
    of_machine.put("k", b"1")
    verbs: tuple[Callable[[], object], ...] = (
        lambda: of_machine.put("k", b"2"),
        lambda: of_machine.get("k"),
        lambda: of_machine.create("new", b"1"),
        lambda: of_machine.create("new", b"2"),
        lambda: bytes(of_machine.get_range("k", 0, 1)),
        lambda: [entry.key for entry in of_machine.list("")],
        lambda: of_machine.delete(["k"]),
        lambda: of_machine.get("k"),
    )
    expected = [None, b"2", True, False, b"2", ["k", "new"], None, None]
    for turn, (verb, told) in enumerate(zip(verbs, expected, strict=True), start=2):
        identity.expire()
        assert verb() == told
        assert len(identity.given) == turn


def test_many_that_are_refused_at_once_renew_once(of_machine: Bucket, identity: Identity) -> None:
    of_machine.put("k", b"1")
    identity.expire()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: of_machine.put(f"k{n}", b"1"), range(8)))
    assert len(identity.given) == 2


def test_a_key_near_its_end_is_replaced_before_anyone_is_refused(
    keyless: str, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does this, once five minutes are left."""
    identity.lasts_s = 240
    for name, value in identity.env("container", tmp_path).items():
        monkeypatch.setenv(name, value)
    bucket = open_bucket(keyless)
    bucket.put("k", b"1")
    deadline = time.monotonic() + 20
    while len(identity.given) < 3:
        assert time.monotonic() < deadline
        bucket.put("k", b"1")


def test_what_nobody_renews_is_an_outage_for_a_while_and_then_a_refusal(
    front: Proxy, s3_url: str, s3_endpoint: str
) -> None:
    url, now = s3_url.replace(s3_endpoint, front.url), [0.0]
    access = StoreSession(open_bucket(url).raw, url, lambda: open_bucket(url).raw, 300.0, lambda: now[0])

    def put() -> None:
        access.ask("k", lambda store: obstore.put(store, "k", b"1", use_multipart=False))

    bucket = re.escape(url.partition("?")[0])
    for begin_s in (1000.0, 1700.0):
        front.admits = lambda _: False
        for after_s in (0.0, 299.0):
            now[0] = begin_s + after_s
            with pytest.raises(StoreUnavailable, match=f"credentials for the bucket {bucket} have expired: E") as told:
                put()
        assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and start this again" in told.value.hint
        assert "\n" not in str(told.value)
        now[0] = begin_s + 301.0
        with pytest.raises(StoreError, match=f"bucket {bucket} have expired, and 300 s brought no new ones: Expired"):
            put()
        front.admits = lambda _: True
        put()  # and the next time it takes as long again


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "ExpiredToken", "The provided token has expired."),
        (400, "TokenRefreshRequired", "The provided token must be refreshed."),
        (403, "AuthenticationFailed", "Signature not valid in the specified time frame: Start [a] - Expiry [b]"),
        (401, "InvalidAuthenticationInfo", "Lifetime validation failed. The token is expired."),
    ],
)
def test_what_a_store_calls_expired_has_expired_at_first_sight(
    s3_url: str, s3_endpoint: str, status: int, code: str, message: str
) -> None:
    with Proxy(s3_endpoint).running() as proxy:
        bucket = open_bucket(s3_url.replace(s3_endpoint, proxy.url), patience_s=0.3)
        proxy.plan("refuse", "GET", times=9, status=status, code=code, message=message)
        with pytest.raises(StoreUnavailable, match=f"have expired: {code}"):
            bucket.get("k")
        assert len(proxy.seen) == 2, "credentials were asked for anew"


@pytest.mark.parametrize(("status", "code"), [(401, "AuthenticationRequired"), (403, "InvalidAccessKeyId")])
def test_what_was_taken_before_and_is_not_any_more_has_expired_and_what_never_was_is_wrong(
    s3_url: str, s3_endpoint: str, status: int, code: str
) -> None:
    with Proxy(s3_endpoint).running() as proxy:
        bucket = open_bucket(s3_url.replace(s3_endpoint, proxy.url), patience_s=0.3)
        proxy.plan("refuse", "GET", times=1, status=status, code=code)
        with pytest.raises(StoreError, match=f"refuses 'k': {code}"):
            bucket.get("k")
        assert bucket.get("k") is None
        proxy.plan("refuse", "GET", times=2, status=status, code=code)
        with pytest.raises(StoreUnavailable, match=f"have expired: {code}"):
            bucket.get("k")
        proxy.plan("refuse", "GET", times=2, status=403, code="AccessDenied")
        with pytest.raises(StoreError, match="refuses 'k': AccessDenied"):
            bucket.get("k")


def test_credentials_that_a_script_puts_into_its_environment_are_taken(
    s3_endpoint: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(s3_endpoint, admits=lambda header: "Credential=OLD/" in header).running() as front:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        bucket = open_bucket(f"{s3_url.partition('?')[0]}?endpoint={front.url}&region=us-east-1", patience_s=0.3)
        bucket.put("k", b"1")
        front.admits = lambda header: "Credential=NEW/" in header
        with pytest.raises(StoreUnavailable, match="have expired"):
            bucket.put("k", b"2")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEW")
        bucket.put("k", b"3")
        assert bucket.get("k") == b"3"
