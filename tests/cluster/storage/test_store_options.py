"""Options of a bucket's URL: every one that obstore documents, with good values and nonsense."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import obstore
import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.store_options import sort_out

_TYPES = Path(inspect.getfile(obstore)).parent / "_store"
_URLS = {"s3": "s3://bucket/prefix?", "gs": "gs://bucket/prefix?", "az": "az://box/prefix?account_name=a&"}
_FILES = {"s3": "_aws.pyi", "gs": "_gcs.pyi", "az": "_azure.pyi"}
_OPENS = """
import sys
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.errors import GpuctlError
for url in sys.stdin.read().splitlines():
    try:
        open_bucket(url, patience_s=0.0, timeout_s=0.5)
    except GpuctlError as error:
        line = str(error)
        assert "\\n" not in line, (url, line)
"""
"""Opens each URL that it reads; ends badly if one of them is anything but open or refused in a line."""


def documented(file: str) -> list[str]:
    return re.findall(r"^    ([a-z0-9_]+): ", (_TYPES / file).read_text(), re.MULTILINE)


def opens(urls: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _OPENS], input="\n".join(urls), capture_output=True, text=True, timeout=150
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", _URLS)
def test_no_option_with_whatever_value_panics(scheme: str) -> None:
    names = {*documented(_FILES[scheme]), *documented("_client.pyi"), "http2_only", "nonsense", "x", "%20", "a%00b"}
    assert {"allow_http", "skip_signature"} <= names
    prefixes = ("", "aws_", "google_", "azure_", "azure_storage_")
    spelled = [f"{prefix}{name}" for prefix in prefixes for name in sorted(names)]
    spelled += [name.upper() for name in spelled]
    values = ("true", "ghost", "5", "", "-1", "http://127.0.0.1:9", "::", "%0A", "%C3%A9")
    done = opens([f"{_URLS[scheme]}{name}={value}" for name in spelled for value in values])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "options",
    [
        "allow_http=true",
        "timeout=5s&connect_timeout=1s&user_agent=me",
        "AWS_REGION=us-west-2&aws_allow_http=true",
        "region=us-west-2&skip_signature=true&virtual_hosted_style_request=true",
        "access_key_id=a&secret_access_key=b&endpoint=http://127.0.0.1:9",
    ],
)
def test_options_of_the_store_and_of_its_client_are_taken(options: str) -> None:
    open_bucket(f"s3://bucket/prefix?{options}")


def test_a_misspelt_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"unknown option 'regoin' \(did you mean region\?\)"):
        open_bucket("s3://bucket/prefix?regoin=us-west-2")


def test_an_option_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'aws_region' is given twice"):
        sort_out("s3", [("region", "a"), ("aws_region", "b")])


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "ftp://x",
        "http://",
        "http://[",
        "http://a b",
        "http://127.0.0.1:99999",
        "http://x:0",
        "//x",
        "http://?",
    ],
)
@pytest.mark.parametrize("option", ["endpoint", "aws_endpoint_url", "metadata_endpoint"])
def test_an_address_that_is_none_is_refused_before_a_request_is_signed(option: str, address: str) -> None:
    with pytest.raises(BadInput) as refused:
        open_bucket(f"s3://bucket/prefix?{option}={quote(address)}")
    said = f"cannot open the bucket 's3://bucket/prefix': {option}={address} is not an address such as http://127.0.0.1:9000"
    assert refused.value.message == said


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket", "AWS_ENDPOINT_URL"),
        ("s3://bucket", "AWS_METADATA_ENDPOINT"),
        ("s3://bucket", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        ("gs://bucket", "GOOGLE_BASE_URL"),
        ("az://box?account_name=a", "AZURE_AUTHORITY_HOST"),
        ("az://box?account_name=a", "IDENTITY_ENDPOINT"),
    ],
)
def test_so_is_one_of_the_environment(url: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "nonsense")
    with pytest.raises(BadInput, match=f"{variable}=nonsense is not an address .*; correct the variable, or unset it"):
        open_bucket(url)
    open_bucket("s3://bucket" if not url.startswith("s3") else "gs://bucket")  # another store does not read it


def test_a_key_with_a_line_end_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "pasted\n")
    with pytest.raises(BadInput, match="AWS_SECRET_ACCESS_KEY has a line end or a control character in it") as refused:
        open_bucket("s3://bucket")
    assert "pasted" not in str(refused.value)


@pytest.mark.parametrize("value", ["abc", "5", ""])
def test_a_time_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(BadInput, match=r"as Duration|is empty"):
        open_bucket(f"s3://bucket/prefix?timeout={value}")


@pytest.mark.parametrize("address", ["http://minio_1:9000", "https://s3.eu-west-1.amazonaws.com", "http://[::1]:9"])
def test_addresses_are_taken(address: str) -> None:
    open_bucket(f"s3://bucket/prefix?access_key_id=a&secret_access_key=b&endpoint={address}")
