"""What an agent leaves for others on its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.bootstrap.boot.leave import claim
from gpuctl.bootstrap.identity import Identity
from gpuctl.bootstrap.traces import MOST_WAIT_S, Traces


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 0.0


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def _traces(root: Path, clock: _Clock, provider: str = "gcp") -> Traces:
    return Traces(Identity(node="n", address="a", bucket="b", provider=provider, root=str(root)), clock)


def _touched(root: Path) -> bool:
    """Since it was last asked."""
    busy = root / "run/gpuctl/busy"
    found = busy.exists()
    busy.unlink(missing_ok=True)
    return found


def test_a_machine_with_a_job_is_busy_and_one_without_is_not(tmp_path: Path, clock: _Clock) -> None:
    traces = _traces(tmp_path, clock)
    traces.show(works=False, waits=False)
    assert not _touched(tmp_path)
    for _ in range(3):
        clock.now += MOST_WAIT_S
        traces.show(works=True, waits=True)
        assert _touched(tmp_path)


def test_a_machine_that_waits_for_others_is_busy_but_not_without_end(tmp_path: Path, clock: _Clock) -> None:
    traces = _traces(tmp_path, clock)
    for after_s, busy in ((0.0, True), (MOST_WAIT_S - 1, True), (2.0, False), (1e6, False)):
        clock.now += after_s
        traces.show(works=False, waits=True)
        assert _touched(tmp_path) is busy
    traces.show(works=True, waits=True)
    traces.show(works=False, waits=True)
    assert _touched(tmp_path), "it has worked in between"


def test_rank_0_is_told_in_run(tmp_path: Path, clock: _Clock) -> None:
    traces = _traces(tmp_path, clock)
    for said in (b'{"node": "a"}', b'{"node": "b"}'):
        traces.write_rank0(said)
        assert (tmp_path / "run/gpuctl/rank0.json").read_bytes() == said


def test_what_the_cloud_takes_nobody_else_does(tmp_path: Path, clock: _Clock) -> None:
    _traces(tmp_path, clock).claim("aws: terminate")
    assert not claim(tmp_path, "idle")


def test_a_node_of_local_leaves_no_traces(tmp_path: Path, clock: _Clock) -> None:
    traces = _traces(tmp_path, clock, provider="")
    traces.show(works=True, waits=True)
    traces.write_rank0(b"{}")
    traces.claim("x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, clock: _Clock) -> None:
    (tmp_path / "run").write_text("a file")
    traces = _traces(tmp_path, clock)
    traces.show(works=True, waits=False)
    traces.write_rank0(b"{}")
    traces.claim("x")
