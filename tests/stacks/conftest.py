"""Accounts of clouds on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stacks import google


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
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[google.Google]:
    """Of Google Cloud, empty, with a service account's credentials and nothing from the home of whoever runs this."""
    for name in [name for name in os.environ if name.startswith(("CLOUDSDK_", "GCLOUD_"))]:
        monkeypatch.delenv(name)
    with google.serving() as server:
        for name, value in google.environment(server, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield server
