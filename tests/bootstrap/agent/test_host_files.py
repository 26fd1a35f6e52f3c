"""What an agent leaves for others on its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.bootstrap.agent.host_files import MOST_WAIT_S, HostFiles
from gpuctl.bootstrap.boot.leave import claim
from gpuctl.bootstrap.identity import NodeIdentity
from tests.fakes.clock import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def _host_files(root: Path, clock: HandClock, provider: str = "gcp") -> HostFiles:
    return HostFiles(NodeIdentity(node="n", address="a", bucket="b", provider=provider, root=str(root)), clock)


def _touched(root: Path) -> bool:
    """Since it was last asked."""
    busy = root / "run/gpuctl/busy"
    found = busy.exists()
    busy.unlink(missing_ok=True)
    return found


def test_a_machine_with_a_job_is_busy_and_one_without_is_not(tmp_path: Path, clock: HandClock) -> None:
    host_files = _host_files(tmp_path, clock)
    host_files.show(works=False, waits=False)
    assert not _touched(tmp_path)
    for _ in range(3):
        clock.now += MOST_WAIT_S
        host_files.show(works=True, waits=True)
        assert _touched(tmp_path)


def test_a_machine_that_waits_for_others_is_busy_but_not_without_end(tmp_path: Path, clock: HandClock) -> None:
    host_files = _host_files(tmp_path, clock)
    for after_s, busy in ((0.0, True), (MOST_WAIT_S - 1, True), (2.0, False), (1e6, False)):
        clock.now += after_s
        host_files.show(works=False, waits=True)
        assert _touched(tmp_path) is busy
    host_files.show(works=True, waits=True)
    host_files.show(works=False, waits=True)
    assert _touched(tmp_path), "it has worked in between"


def test_rank_0_is_told_in_run(tmp_path: Path, clock: HandClock) -> None:
    host_files = _host_files(tmp_path, clock)
    for said in (b'{"node": "a"}', b'{"node": "b"}'):
        host_files.write_rank0(said)
        assert (tmp_path / "run/gpuctl/rank0.json").read_bytes() == said


def test_what_is_wrong_with_a_gpu_is_told_in_run(tmp_path: Path, clock: HandClock) -> None:
    _host_files(tmp_path, clock).write_ill("GPU 1: it has fallen off the bus (Xid 79)")
    assert (tmp_path / "run/gpuctl/ill").read_text() == "GPU 1: it has fallen off the bus (Xid 79)"


def test_what_the_cloud_takes_nobody_else_does(tmp_path: Path, clock: HandClock) -> None:
    _host_files(tmp_path, clock).claim("aws: terminate")
    assert not claim(tmp_path, "idle")


def test_a_node_of_local_leaves_no_traces(tmp_path: Path, clock: HandClock) -> None:
    host_files = _host_files(tmp_path, clock, provider="")
    host_files.show(works=True, waits=True)
    host_files.write_rank0(b"{}")
    host_files.claim("x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, clock: HandClock) -> None:
    (tmp_path / "run").write_text("a file")
    host_files = _host_files(tmp_path, clock)
    host_files.show(works=True, waits=False)
    host_files.write_rank0(b"{}")
    host_files.claim("x")
