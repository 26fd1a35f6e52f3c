"""The bucket with the standard library alone, on real servers of each kind, beside the client that all others use."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from gpuctl.bootstrap.boot.metadata import Credentials, Metadata
from gpuctl.bootstrap.boot.sigv4 import signed
from gpuctl.bootstrap.boot.store import fetch, open_store
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes.metadata import Service
from tests.fakes.scripted_server import answering
from tests.fakes.stores import azurite

KEY = "boot/i-1 (a+b).json"


def reachable(url: str, request: pytest.FixtureRequest) -> str:
    """The same place, with keys that the boot program understands: of an Azure account it knows no key."""
    if not url.startswith("az:"):
        return url
    endpoint: str = request.getfixturevalue("azurite_endpoint")
    return azurite.shared_url(endpoint, url.removeprefix("az://").partition("/")[0], "racwdl")


@pytest.fixture
def url(bucket_url: str, request: pytest.FixtureRequest) -> str:
    return reachable(bucket_url, request)


def test_what_one_client_writes_the_other_reads(url: str, bucket_url: str) -> None:
    ours, theirs = open_store(url, {}, None), open_bucket(bucket_url)
    with pytest.raises(KeyError):
        ours.get(KEY)
    ours.put(KEY, b"booting")
    assert theirs.get(KEY) == b"booting"
    theirs.put(KEY, b"x" * 100_000)
    assert ours.get(KEY) == b"x" * 100_000
    ours.put(KEY, b"")
    assert theirs.get(KEY) == b""


def test_on_s3_the_keys_are_those_of_the_machines_role_or_of_the_environment(s3_url: str) -> None:
    bare = s3_url.replace("access_key_id", "x").replace("secret_access_key", "y")
    with Service("aws").running() as service:
        open_store(bare, {}, Metadata("aws", endpoint=service.url)).put("a", b"1")
        assert any("security-credentials/node" in line for line in service.seen)
    open_store(bare, {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}, None).put("b", b"2")
    assert open_bucket(s3_url).get_many(["a", "b"]) == [b"1", b"2"]
    with pytest.raises(OSError, match="no credentials for the bucket"):
        open_store(bare, {}, None).get("a")


@pytest.mark.parametrize(
    ("provider", "url", "path", "headers"),
    [
        ("gcp", "gs://b/p?base_url={at}", "/b/p/k", {}),
        ("azure", "az://c/p?account_name=a&endpoint={at}", "/c/p/k", {"x-ms-blob-type": "BlockBlob"}),
    ],
)
def test_on_the_other_clouds_the_token_of_the_machines_account_is_shown(
    provider: Any, url: str, path: str, headers: dict[str, str]
) -> None:
    with Service(provider).running() as service, answering(200) as (at, seen):
        open_store(url.format(at=at), {}, Metadata(provider, endpoint=service.url)).put("k", b"1")
    assert seen[0]["path"] == path
    assert seen[0]["authorization"].startswith("Bearer ")
    assert headers.items() <= seen[0].items()
    assert provider != "azure" or any("storage.azure.com" in line for line in service.seen)


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not() -> None:
    with answering(503, 200) as (at, seen):
        open_store(f"gs://b/p?base_url={at}&bearer_token=t", {}, None).put("k", b"1")
        assert len(seen) == 2
    with answering(503) as (at, seen):
        with pytest.raises(OSError, match="503"):
            open_store(f"gs://b/p?base_url={at}&bearer_token=t", {}, None).put("k", b"1", tries=1)
        assert len(seen) == 1
    with answering(403) as (at, seen):
        with pytest.raises(OSError, match="PUT k: 403 said the server"):
            open_store(f"gs://b/p?base_url={at}&bearer_token=t", {}, None).put("k", b"1")
        assert len(seen) == 1


def test_a_bucket_that_is_not_there_is_an_error_and_no_missing_object() -> None:
    with pytest.raises(OSError, match="Connection refused"):
        open_store("s3://b/p?endpoint=http://127.0.0.1:9&access_key_id=k&secret_access_key=s", {}, None).get("k")
    with pytest.raises(ValueError, match="http:// is not a bucket"):
        open_store("http://b/p", {}, None)


def test_what_is_fetched_has_the_digest_it_should_have(tmp_path: Path) -> None:
    store = open_store((tmp_path / "bucket").as_uri(), {}, None)
    store.put("boot/1/a.whl", b"wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    assert fetch(store, "boot/1/a.whl", digest, tmp_path / "root").read_bytes() == b"wheel"
    store.put("boot/1/a.whl", b"other")
    with pytest.raises(OSError, match=f"has the digest .*, not {digest}"):
        fetch(store, "boot/1/a.whl", digest, tmp_path / "root")
    with pytest.raises(OSError, match=r"the bucket has no boot/2/a\.whl"):
        fetch(store, "boot/2/a.whl", digest, tmp_path / "root")


@pytest.mark.parametrize("token", ["", "session/token+=="])
@pytest.mark.parametrize(
    ("method", "url", "service", "body"),
    [
        ("GET", "https://s3.us-east-1.amazonaws.com/b/p/a%20%28b%2B%29.json", "s3", b""),
        ("PUT", "http://127.0.0.1:9000/b/p/k?x=2&a=%20b&empty=", "s3", b"body"),
        ("POST", "https://autoscaling.us-east-1.amazonaws.com/", "autoscaling", b"Action=Terminate"),
    ],
)
def test_signatures_are_those_that_botocore_makes(method: str, url: str, service: str, body: bytes, token: str) -> None:
    ours = signed(method, url, "us-east-1", service, Credentials("key", "secret", token), {}, body, now=lambda: 1e9)
    stamp = ours["X-Amz-Date"]
    assert stamp == "20010909T014640Z"
    assert ours.get("X-Amz-Security-Token", "") == token
    kind = S3SigV4Auth if service == "s3" else SigV4Auth
    theirs = kind(BotoCredentials("key", "secret", token or None), service, "us-east-1")
    told = {name: value for name, value in ours.items() if name != "Authorization"}
    request = AWSRequest(method=method, url=url, data=body, headers=told)
    request.context = {"timestamp": stamp, "payload_signing_enabled": True}
    whole = theirs.canonical_request(request)
    assert ours["Authorization"].endswith(
        f"Signature={theirs.signature(theirs.string_to_sign(request, whole), request)}"
    )
