"""What several folders' tests share: real object stores on loopback, and buckets that nobody else uses."""

from __future__ import annotations

import os
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.stores import azurite, gcs, s3


def pytest_configure() -> None:
    """What ``&`` starts ignores SIGINT, what ``nohup`` starts SIGHUP; so would all that the tests start and signal."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


_LONGEST = ("machines", "rented", "e2e")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (``-n 3``), a file's tests stay together, and so do all that boot machines. The longest begin first,
    or all would wait for them at the end."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.parent.name not in _LONGEST))
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        folder = item.path.parent
        item.add_marker(pytest.mark.xdist_group(folder.name if folder.name == "machines" else str(item.path)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses to go on where xdist does not see the groups: https://github.com/pytest-dev/pytest-xdist/issues/1386."""
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist would tear files apart: install what constraints.txt names")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were left out for want of what, and the command that adds it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"left out {number:4}: {reason}")
    if reasons:
        terminalreporter.write_line(
            f"left out {reasons.total():4} in all; on Debian, `sudo .ci/install-system` adds the programs"
        )


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the clusters, the credentials or the proxy of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("GPUCTL_", "AWS_", "GOOGLE_", "AZURE_", "ARM_")):
                patch.delenv(name)
        patch.setenv("GPUCTL_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        patch.setenv("no_proxy", "127.0.0.1,localhost")
        # torch's store asks the name server for the name of each peer, and waits 5 s by default when it is not there.
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        yield


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of a moto S3 server."""
    with s3.serving() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azurite_endpoint() -> Iterator[str]:
    """URL of the account of an Azurite server."""
    try:
        with azurite.serving() as endpoint:
            yield endpoint
    except azurite.NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gcs_endpoint() -> Iterator[str]:
    """URL of our own server of Google Cloud Storage."""
    with gcs.serving() as endpoint:
        yield endpoint


@pytest.fixture
def s3_url(s3_endpoint: str) -> str:
    """URL of a prefix in a new, empty S3 bucket, with all that ``open_bucket`` needs."""
    bucket = _new_name()
    s3.create(s3_endpoint, bucket)
    return s3.url(s3_endpoint, bucket)


@pytest.fixture
def az_url(azurite_endpoint: str) -> str:
    """URL of a prefix in a new, empty container of Azure Blob Storage."""
    container = _new_name()
    azurite.create(azurite_endpoint, container)
    return azurite.url(azurite_endpoint, container)


@pytest.fixture
def gs_url(gcs_endpoint: str) -> str:
    """URL of a prefix in a new, empty bucket of Google Cloud Storage."""
    bucket = _new_name()
    gcs.create(gcs_endpoint, bucket)
    return gcs.url(gcs_endpoint, bucket)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """URL of a new, empty folder as a bucket."""
    return f"file://{tmp_path}/bucket"


@pytest.fixture(params=["file", "s3", "az", "gs"])
def bucket_url(request: pytest.FixtureRequest) -> str:
    """The test runs on a folder, on S3, on Azure Blob Storage and on Google Cloud Storage."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def _new_name() -> str:
    return f"bucket-{uuid.uuid4().hex}"
