"""Committed checkpoints from outside of their job."""

from __future__ import annotations

from pathlib import Path

from gpuctl.cluster import layout
from gpuctl.cluster.checkpoints import listing, verification
from gpuctl.cluster.storage.bucket import open_bucket
from tests.cluster.checkpoints.chains import JOB


def test_looking_at_a_job_without_checkpoints_writes_nothing(tmp_path: Path, file_url: str) -> None:
    store = open_bucket(file_url)
    assert verification.check(store, JOB, listing.committed(store, JOB)) == []
    assert not (tmp_path / "bucket" / layout.JOBS).exists()
