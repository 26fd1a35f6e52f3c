"""Loading with worker processes: the same samples, in time, and without being in the way of the end."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from gpuctl import Trainer
from gpuctl.trainers.data.batches import Batches, MicroBatch
from gpuctl.trainers.data.sampling import Place, Sampling
from gpuctl.trainers.world import World
from tests.trainers.ranks import Ranks, run
from tests.waiting import until

SAMPLES = 23


class Numbered(Dataset[tuple[Tensor, int]]):
    """Sample n is (n, 10 n)."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), 10 * index


class Counting(Sampling):
    """Knows how often it was asked."""

    asked = 0

    def slice(self, step: int, rank: int, world: int) -> Tensor:
        self.asked += 1
        return super().slice(step, rank, world)


def tensors() -> TensorDataset:
    numbers = torch.arange(SAMPLES)
    return TensorDataset(numbers.float()[:, None], 10 * numbers)


def plain(batches: list[tuple[Place, list[MicroBatch]]]) -> list[Any]:
    return [
        (place, [(inputs.tolist(), targets.tolist(), weight) for inputs, targets, weight in parts])
        for place, parts in batches
    ]


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (2, 3), (6, 7)])
def test_workers_bring_the_same_samples_in_the_same_order(rank: int, world: int) -> None:
    """Over the end of an epoch, from the middle of a run, with an uneven last micro-batch and with no sample at all."""
    sampling = Sampling(SAMPLES, 5, seed=3)
    places = [(step, rank) for step in range(3, 9)]
    expected, alone, by_workers = (
        plain(list(Batches(data, sampling, World(rank, world), 2, workers).of(places)))
        for data, workers in [(tensors(), 2), (Numbered(), 0), (Numbered(), 2)]
    )
    assert [place for place, _ in expected] == places
    assert alone == expected
    assert by_workers == expected


def test_micro_batches_weigh_what_they_are_of_the_global_batch() -> None:
    sampling = Sampling(SAMPLES, 7, seed=0)
    weights = [
        [weight for _, _, weight in Batches(tensors(), sampling, World(rank, 3), 2, 0).at((0, rank))]
        for rank in range(3)
    ]
    assert weights == [[2 / 7, 1 / 7], [2 / 7], [2 / 7]]


def test_a_long_run_is_not_laid_out_before_it_begins() -> None:
    sampling = Counting(SAMPLES, 5, seed=0)
    place, _ = next(Batches(Numbered(), sampling, World(), None, workers=1).of((step, 0) for step in range(1000)))
    assert place == (0, 0)
    assert sampling.asked < 10, "as many as the loader fetches ahead"


def test_the_same_workers_go_on_with_other_places() -> None:
    """Also from a place in the middle of those that they have fetched already."""
    of_others = multiprocessing.active_children()  # of a test before, on their way out
    batches = Batches(Numbered(), Sampling(SAMPLES, 6, seed=3), World(0, 3), None, workers=2)
    alone = Batches(Numbered(), Sampling(SAMPLES, 6, seed=3), World(0, 3), None, workers=0)
    first = batches.of((step, 0) for step in range(50))
    assert plain([next(first), next(first)]) == plain(list(alone.of([(0, 0), (1, 0)])))
    workers = [one for one in multiprocessing.active_children() if one not in of_others]
    places = [(7, 2), (3, 1), (3, 2)]
    assert plain(list(batches.of(places))) == plain(list(alone.of(places)))
    assert len(workers) == 2
    assert [one for one in multiprocessing.active_children() if one not in of_others] == workers


def fit_with_workers(folder: str, steps: int, mark: str) -> list[float]:
    # As in a process that torchrun starts; a child of a fork server would start another one for its own children.
    multiprocessing.set_start_method("fork", force=True)
    model = nn.Linear(1, 1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        Path(mark).touch()
        return (output.squeeze(1) - target).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    Trainer(
        model, loss, optimizer, Numbered(), global_batch=5, steps=steps, checkpoints=folder, workers=2, log_every=1000
    ).fit()
    return [p.sum().item() for p in model.parameters()]


@pytest.mark.slow
def test_a_rank_with_loading_workers_leaves_with_them(tmp_path: Path) -> None:
    """The workers inherit the handler that takes SIGTERM, and must end all the same."""
    mark = tmp_path / "begun"
    with Ranks(2, fit_with_workers, str(tmp_path / "kept"), 1_000_000, str(mark)) as ranks:
        until(mark.exists, f"{mark}")
        for rank in range(2):
            ranks.send(rank, signal.SIGTERM)
        assert [end.code for end in ranks.wait(30)] == [0, 0]


@pytest.mark.slow
def test_a_run_with_fewer_steps_than_are_done_changes_nothing(tmp_path: Path) -> None:
    kept, mark = tmp_path / "kept", str(tmp_path / "begun")
    (weights,) = run(1, fit_with_workers, str(kept), 8, mark)
    before = {path for path in kept.rglob("*") if path.is_file() and path.parent.name != "ledger"}
    assert run(1, fit_with_workers, str(kept), 4, mark) == [weights]
    assert {path for path in kept.rglob("*") if path.is_file() and path.parent.name != "ledger"} == before
    assert run(1, fit_with_workers, str(kept), 8, mark) == [weights]
