"""The files of a job's script, from outside of the job."""

from __future__ import annotations

import pytest

from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.snapshots import maintenance
from gpuctl.cluster.storage.bucket import open_bucket
from tests.cluster.checkpoints.export.test_pull import keep


def test_the_files_of_a_job_that_is_not_over_are_not_deleted_whoever_asks(file_url: str) -> None:
    kept = keep(file_url, {"model": b"weights"}, {})
    store = open_bucket(file_url)
    before = store.list("")
    with pytest.raises(GpuctlError, match="job job is still running and uses its files"):
        maintenance.remove(store, "job")
    assert store.list("") == before
    assert maintenance.sets(store, "job") == (kept,)
