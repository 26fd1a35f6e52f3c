"""The ``cluster`` fixture; whatever a test leaves running is ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "state", tmp_path / "work")
    try:
        yield made
    finally:
        made.end()
