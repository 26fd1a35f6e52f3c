"""Accounts of clouds on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.aws.api import amazon
from tests.fakes.aws.user import Account
from tests.fakes.gcp import api
from tests.fakes.pulumi import cli


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    real = cli.real()
    used = f"the real CLI, {real}" if real else "a stand-in for its CLI (there is no pulumi on PATH)"
    terminalreporter.write_line(f"Pulumi: clusters are rented by {used}")


@pytest.fixture
def aws_account(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the moto server, with us-east-1 and nothing from the home of whoever runs this."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def pulumi_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, with plug-ins."""
    monkeypatch.setenv("PATH", f"{cli.install(tmp_path / 'bin')}:{os.environ['PATH']}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[api.Google]:
    """Of Google Cloud, empty, with a service account's credentials and nothing from the home of whoever runs this."""
    for name in [name for name in os.environ if name.startswith(("CLOUDSDK_", "GCLOUD_"))]:
        monkeypatch.delenv(name)
    with api.serving() as server:
        for name, value in api.environment(server, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def account(aws_account: None, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    del aws_account
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    without: list[str] = []
    vcpus = [384]
    denied: set[str] = set()
    with (
        amazon(s3_endpoint, without, vcpus, denied) as endpoint,
        Account(tmp_path, endpoint, without, vcpus, denied) as account,
    ):
        yield account
