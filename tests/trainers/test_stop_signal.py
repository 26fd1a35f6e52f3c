"""Being asked to stop: every rank leaves after the same step, and nothing is lost or done twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch import Tensor

from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.worker_context import WorkerContext
from tests.trainers.rank_scripts import stopping
from tests.trainers.rank_scripts.checkpointing import same
from tests.trainers.rank_scripts.stopping import EVERY, STEPS, Moments
from tests.trainers.ranks import Ranks, run
from tests.waiting import until


def round_env(folder: Path, number: int) -> dict[str, str]:
    """A job's environment in round ``number``; its bucket and its folders are below ``folder``."""
    place = folder / f"round-{number}"
    place.mkdir()
    bucket = (folder / "bucket").as_uri()
    return WorkerContext("demo", bucket, "job-1", number, "node-0", place, folder / "kept", folder / "tb").env()


def committed(folder: Path) -> list[int]:
    return [entry.step for entry in listing.committed(open_bucket((folder / "bucket").as_uri()), "job-1")]


def marks(folder: Path, number: int, name: str) -> list[str]:
    return sorted(path.name for path in (folder / f"round-{number}").glob(f"{name}.*"))


def logged(folder: Path, rank: int) -> list[int]:
    path = folder / f"log.{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def go_on(folder: Path, world: int, undisturbed: dict[str, Tensor]) -> None:
    """The next round does what is left, to the last bit, and no step is missing or done twice."""
    for weights in run(world, stopping.train, str(folder / "log"), {}, env=round_env(folder, 2)):
        assert same(weights, undisturbed)
    for rank in range(world):
        assert logged(folder, rank) == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights that three ranks come to whom nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    weights: dict[str, Tensor] = run(3, stopping.train, str(folder / "log"), {}, env=round_env(folder, 1))[0]
    return weights


@pytest.mark.parametrize(
    ("moments", "last"),
    [
        ({0: (3, "end"), 1: (3, "end"), 2: (3, "end")}, {4, 5}),
        ({0: (9, "begin"), 1: (5, "backward"), 2: (2, "end")}, {10}),
        ({0: (2, "end"), 1: (10, "backward"), 2: (6, "begin")}, {11, 12}),
        ({0: (4, "saving"), 1: (4, "begin"), 2: (4, "saving")}, {6, 7}),
        ({0: (4, "backward"), 1: (4, "saving"), 2: (8, "saving")}, {10, 11}),
    ],
    ids=["all at once", "rank 0 last", "rank 0 first", "while saving", "one after the other"],
)
def test_all_ranks_stop_after_the_same_step_and_the_next_round_goes_on_from_it(
    tmp_path: Path, undisturbed: dict[str, Tensor], moments: Moments, last: set[int]
) -> None:
    with Ranks(3, stopping.train, str(tmp_path / "log"), moments, env=round_env(tmp_path, 1)) as ranks:
        assert [end.code for end in ranks.wait()] == [0, 0, 0]
    steps = {logged(tmp_path, rank)[-1] for rank in range(3)}
    assert len(steps) == 1
    assert steps <= last, "soon after the last of them was asked"
    assert committed(tmp_path)[-1:] == list(steps)
    assert marks(tmp_path, 1, "drained") == ["drained.0", "drained.1", "drained.2"]
    go_on(tmp_path, 3, undisturbed)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_signals_from_outside_in_any_order_stop_all_ranks(
    tmp_path: Path, undisturbed: dict[str, Tensor], order: tuple[int, ...]
) -> None:
    env = round_env(tmp_path, 1)
    with Ranks(3, stopping.train, str(tmp_path / "log"), {}, 5, env=env) as ranks:
        until(lambda: all(logged(tmp_path, rank)[-1:] == [5] for rank in range(3)), "step 5 of all ranks")
        assert marks(tmp_path, 1, "aware") == ["aware.0", "aware.1", "aware.2"]
        for rank in order:
            ranks.send(rank, signal.SIGTERM)
            ranks.send(rank, signal.SIGTERM)  # a second one changes nothing
        (tmp_path / "log.go").touch()
        assert [end.code for end in ranks.wait()] == [0, 0, 0]
    assert {logged(tmp_path, rank)[-1] for rank in range(3)} <= {6, 7}
    assert marks(tmp_path, 1, "drained") == ["drained.0", "drained.1", "drained.2"]
    go_on(tmp_path, 3, undisturbed)


def test_while_one_rank_is_not_asked_training_goes_on_to_its_end(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    moments: Moments = {0: (2, "end"), 2: (3, "backward")}
    for weights in run(3, stopping.train, str(tmp_path / "log"), moments, env=round_env(tmp_path, 1)):
        assert same(weights, undisturbed)
    assert marks(tmp_path, 1, "drained") == []
    assert committed(tmp_path) == list(range(EVERY, STEPS + 1, EVERY))


def test_a_signal_at_the_last_step_is_no_unfinished_work(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    """Rank 0 would have all stop one step later, which there is not: they end as if nobody had asked."""
    moments: Moments = dict.fromkeys(range(3), (STEPS, "end"))
    for weights in run(3, stopping.train, str(tmp_path / "log"), moments, env=round_env(tmp_path, 1)):
        assert same(weights, undisturbed)
    assert marks(tmp_path, 1, "drained") == []


def test_a_world_of_one_stops_at_once(tmp_path: Path) -> None:
    env = round_env(tmp_path, 1)
    with Ranks(1, stopping.train, str(tmp_path / "log"), {0: (5, "backward")}, env=env) as ranks:
        assert [end.code for end in ranks.wait()] == [0]
    assert logged(tmp_path, 0) == [1, 2, 3, 4, 5]
    assert committed(tmp_path) == [4, 5]
    assert marks(tmp_path, 1, "drained") == ["drained.0"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (weights,) = run(1, stopping.train, str(alone / "log"), {}, env=round_env(alone, 1))
    go_on(tmp_path, 1, weights)
