"""The files of a job's script, from outside of the job."""

from __future__ import annotations

import pytest

from gpuctl.cluster import keptfiles
from gpuctl.cluster.bucket import open_bucket
from gpuctl.cluster.errors import GpuctlError
from tests.cluster.test_pulled import keep


def test_the_files_of_a_job_that_is_not_over_are_not_deleted_whoever_asks(file_url: str) -> None:
    kept = keep(file_url, {"model": b"weights"}, {})
    store = open_bucket(file_url)
    before = store.list("")
    with pytest.raises(GpuctlError, match="job job is not over, and goes on with its files"):
        keptfiles.remove(store, "job")
    assert store.list("") == before
    assert keptfiles.sets(store, "job") == (kept,)
