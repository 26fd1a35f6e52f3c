"""The ``written`` fixtures: a cluster of which only the records exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.written_cluster import WrittenCluster


@pytest.fixture
def written(tmp_path: Path, file_url: str) -> WrittenCluster:
    """On a folder."""
    return WrittenCluster(tmp_path, file_url)


@pytest.fixture
def written_anywhere(tmp_path: Path, bucket_url: str) -> WrittenCluster:
    """The test runs twice: on a folder and on S3."""
    return WrittenCluster(tmp_path, bucket_url)
