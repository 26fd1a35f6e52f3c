"""What several folders' tests share: real object stores on loopback, and buckets that nobody else uses."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import environment, failures, leftovers, promised
from tests.fakes.stores import azurite, gcs, s3

environment.clean()
leftovers.name_this_run()

# The same examples in every run, however long one takes: what fails here fails for the next one too.
hypothesis.settings.register_profile(
    "gate", deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("gate")

_LONGEST = ("machines", "rented", "e2e")
_HEAVY = (
    "e2e",
    "machines",
    "bootstrap/agent/test_agent.py",
    "bootstrap/boot/test_debian.py",
    "bootstrap/containers",
    "bootstrap/launch",
    "bootstrap/torchrun_plugin/test_torchrun.py",
    "cli/commands/machines/test_staying.py",
    "docs/test_commands.py",
    "trainers/checkpoint/test_kills.py",
    "trainers/checkpoint/test_other_writers.py",
)
"""What starts whole clusters, machines, containers, or many ranks: never two of them at a time, on few cores."""
_STORIES = "docs/test_commands.py"
"""The slow ones of these small clusters take a quarter of an hour: beside the others, or all would wait for them."""
_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (``-n 3``), a file's tests stay together, and so do all of ``_HEAVY``. The longest begin first, or
    all would wait for them at the end."""
    items.sort(key=lambda item: (not _is_heavy(item), item.path.parent.name not in _LONGEST, not _is_slow_story(item)))
    for item in items:
        if _is_heavy(item):
            item.add_marker(pytest.mark.xdist_group("heavy"))
        elif not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def _is_heavy(item: pytest.Item) -> bool:
    return not _is_slow_story(item) and any(item.path.is_relative_to(_HERE / path) for path in _HEAVY)


def _is_slow_story(item: pytest.Item) -> bool:
    return item.path == _HERE / _STORIES and item.get_closest_marker("slow") is not None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses to go on where xdist does not see the groups: https://github.com/pytest-dev/pytest-xdist/issues/1386."""
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist would tear files apart: install what constraints.txt names")


def pytest_sessionstart(session: pytest.Session) -> None:
    """What a killed run has left would take this one's processor, ports and disk."""
    if not hasattr(session.config, "workerinput") and (swept := leftovers.sweep()):
        print(f"removed what runs that were killed had left: {', '.join(swept)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        folder = getattr(item, "funcargs", {}).get("tmp_path")
        report.sections += failures.sections(call.excinfo.value if call.excinfo else None, folder)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where all programs are promised, a test that lacks one fails the run: nobody would miss it."""
    if os.environ.get("CI") == "true" and promised.lacking(_left_out(session.config)):
        session.exitstatus = promised.LEFT_OUT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were left out for want of what, and the command that adds it."""
    reasons = _left_out(terminalreporter.config)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"left out {number:4}: {reason}")
    if reasons:
        terminalreporter.write_line(f"left out {reasons.total():4} in all")
    if missing := promised.lacking(reasons):
        terminalreporter.write_line(f"for want of {', '.join(missing)}: `{promised.INSTALL}` adds that")
        if os.environ.get("CI") == "true":
            terminalreporter.write_line("which fails this run, because CI=true promises that all of it is there")


def _left_out(config: pytest.Config) -> Counter[str]:
    """Reasons, and how many tests each."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the clusters or the settings of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        leftovers.sign(tmp_path_factory.getbasetemp())
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("GPUCTL_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        for name, value in environment.TERMINAL.items():
            patch.setenv(name, value)
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
