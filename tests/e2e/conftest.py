"""A cluster, or machines on a network of their own with a bucket at the switch; what a test leaves running is ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.network import Network, entering, namespace, s3_bucket
from tests.e2e.machine import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "state", tmp_path / "work")
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def switch() -> Iterator[Network]:
    """Network namespaces need root: see ``network.is_possible``."""
    holder = namespace()
    net = Network(entering(holder))
    yield net
    net.close()
    holder.kill()
    holder.wait()


@pytest.fixture
def bucket(switch: Network) -> Iterator[str]:
    """URL of a bucket on a real S3 server at the switch."""
    with s3_bucket(switch._at_switch) as url:
        yield url
