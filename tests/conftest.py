"""What several folders' tests share: a real S3 server on loopback, and buckets that nobody else uses."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# Ends with its parent, however that ends: its standard input is closed then.
_S3_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the clusters, the credentials or the proxy of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("GPUCTL_", "AWS_", "GOOGLE_", "AZURE_")):
                patch.delenv(name)
        patch.setenv("GPUCTL_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        patch.setenv("no_proxy", "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of a moto S3 server in a process of its own, on a port that the kernel chose."""
    with subprocess.Popen(
        [sys.executable, "-c", _S3_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        assert port, f"the S3 server ended with {server.wait()} before it listened"
        yield f"http://127.0.0.1:{port}"
        server.kill()


@pytest.fixture
def s3_url(s3_endpoint: str) -> str:
    """URL of a prefix in a new, empty S3 bucket, with all that ``open_bucket`` needs."""
    bucket = f"bucket-{uuid.uuid4().hex}"
    request = urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT")
    with urllib.request.urlopen(request, timeout=30):
        pass
    options = f"endpoint={s3_endpoint}&region=us-east-1&access_key_id=test&secret_access_key=test"
    return f"s3://{bucket}/prefix?{options}"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """URL of a new, empty folder as a bucket."""
    return f"file://{tmp_path}/bucket"


@pytest.fixture(params=["file", "s3"])
def bucket_url(request: pytest.FixtureRequest) -> str:
    """The test runs twice: on a folder and on S3."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
