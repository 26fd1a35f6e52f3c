"""The last checkpoint before a machine is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.records.checkpoints import CheckpointEntry, CheckpointIndex
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.trainers.checkpoint.save.last_save import choose
from tests.trainers.rank_scripts import deadlines
from tests.trainers.ranks import Ended, Ranks


@pytest.mark.parametrize(
    ("left_s", "new_s", "in_flight_s", "choice"),
    [
        (30.0, 5.0, [], "both"),
        (None, 5.0, [100.0], "both"),
        (30.0, 10.0, [10.0], "both"),
        (30.0, 20.0, [10.0], "new"),
        (30.0, None, [10.0], "both"),
        (30.0, None, [float("inf")], "both"),
        (30.0, 40.0, [10.0], "finish"),
        (30.0, 40.0, [50.0], "new"),
        (30.0, 10.0, [5.0, 5.0], "both"),
        (30.0, 10.0, [10.0, 10.0], "new"),
        (30.0, 40.0, [10.0, 50.0], "finish"),
    ],
)
def test_what_fits_into_the_time_left_is_chosen(
    left_s: float | None, new_s: float | None, in_flight_s: list[float], choice: str
) -> None:
    assert choose(left_s, new_s, in_flight_s) == choice


def entries(folder: Path) -> tuple[CheckpointEntry, ...]:
    store = open_bucket(f"file://{folder}/bucket/jobs/job-1/checkpoints")
    return (ledgers.checkpoints_in(store).read().value or CheckpointIndex()).entries


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    place = f"file://{tmp_path}/bucket"
    return WorkerContext("demo", place, "job-1", 1, "node-0", tmp_path, tmp_path, tmp_path).env()


@pytest.mark.timing
def test_with_time_enough_the_one_on_its_way_is_finished_and_a_last_one_written(
    tmp_path: Path, env: dict[str, str]
) -> None:
    ended = noticed(env, 40)
    found = entries(tmp_path)
    assert [(entry.step, entry.reason) for entry in found] == [(1, "asked"), (2, "interval"), (3, "notice")], ended
    took_s, left_s = found[0].took_s, found[-1].left_s
    assert left_s is not None
    assert 30 * took_s < left_s < 40 * took_s


@pytest.mark.timing
def test_with_time_for_one_the_one_on_its_way_makes_room(tmp_path: Path, env: dict[str, str]) -> None:
    ended = noticed(env, 1.9)
    found = entries(tmp_path)
    assert [(entry.step, entry.reason) for entry in found] == [(1, "asked"), (3, "notice")], ended
    assert found[-1].took_s < 2.0 * found[0].took_s, "it does not wait for what was cancelled"


@pytest.mark.timing
def test_without_time_for_a_new_one_the_one_on_its_way_is_finished(tmp_path: Path, env: dict[str, str]) -> None:
    ended = noticed(env, 0.6)
    assert [(entry.step, entry.reason) for entry in entries(tmp_path)] == [(1, "asked"), (2, "interval")], ended
    assert "s are left: finishing the checkpoint under way, and making none of step 3" in ended[0].said


@pytest.mark.timing
def test_two_on_their_way_are_both_counted_and_both_make_room(tmp_path: Path, env: dict[str, str]) -> None:
    with Ranks(1, deadlines.noticed_behind_two, 2.6, env=env) as ranks:
        ended = ranks.wait()
    assert [(entry.step, entry.reason) for entry in entries(tmp_path)] == [(1, "asked"), (4, "notice")], ended


@pytest.mark.timing
def test_a_first_save_is_finished_where_a_new_one_does_not_fit(tmp_path: Path, env: dict[str, str]) -> None:
    with Ranks(1, deadlines.noticed_in_the_first_save, 1.0, env=env) as ranks:
        (end,) = ranks.wait()
    assert [(entry.step, entry.reason) for entry in entries(tmp_path)] == [(1, "asked")], end
    assert "s are left: finishing the checkpoint under way, and making none of step 2" in end.said


@pytest.mark.timing
@pytest.mark.parametrize(("lefts", "steps"), [((40, 0.6), [1, 2, 3]), ((0.6, 40), [1, 2])])
def test_rank_0_decides_for_all_whatever_time_they_have_left(
    tmp_path: Path, env: dict[str, str], lefts: tuple[float, float], steps: list[int]
) -> None:
    with Ranks(2, deadlines.noticed_unlike, lefts, env=env) as ranks:
        ended = ranks.wait()
    assert [end.code for end in ended] == [0, 0], ended
    assert [entry.step for entry in entries(tmp_path)] == steps, ended


def noticed(env: dict[str, str], left: float) -> list[Ended]:
    with Ranks(2, deadlines.noticed_in_a_save, left, env=env) as ranks:
        ended = ranks.wait()
    assert [end.code for end in ended] == [0, 0], ended
    return ended
