"""A bucket with one job's checkpoints."""

from __future__ import annotations

import pytest

from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.cluster.checkpoints.chains import JOB
from tests.fakes.checkpoints import Maker


@pytest.fixture
def store(bucket_url: str) -> Bucket:
    return open_bucket(bucket_url)


@pytest.fixture
def maker(store: Bucket) -> Maker:
    return Maker(listing.folder(store, JOB), part_bytes=1024)
