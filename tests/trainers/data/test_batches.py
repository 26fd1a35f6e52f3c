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
from gpuctl.trainers.data.sampling import Sampling
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


def plain(batches: list[tuple[int, list[MicroBatch]]]) -> list[Any]:
    return [
        (step, [(inputs.tolist(), targets.tolist(), weight) for inputs, targets, weight in parts])
        for step, parts in batches
    ]


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (2, 3), (6, 7)])
def test_workers_bring_the_same_samples_in_the_same_order(rank: int, world: int) -> None:
    """Over the end of an epoch, from the middle of a run, with an uneven last micro-batch and with no sample at all."""
    sampling, place = Sampling(SAMPLES, 5, seed=3), World(rank, world)
    expected, alone, by_workers = (
        plain(list(Batches(data, sampling, place, 2, workers).of_steps(3, 9)))
        for data, workers in [(tensors(), 2), (Numbered(), 0), (Numbered(), 2)]
    )
    assert [step for step, _ in expected] == [3, 4, 5, 6, 7, 8]
    assert alone == expected
    assert by_workers == expected


def test_micro_batches_weigh_what_they_are_of_the_global_batch() -> None:
    sampling = Sampling(SAMPLES, 7, seed=0)
    weights = [
        [weight for _, _, weight in Batches(tensors(), sampling, World(rank, 3), 2, 0).of_step(0)] for rank in range(3)
    ]
    assert weights == [[2 / 7, 1 / 7], [2 / 7], [2 / 7]]


def test_a_long_run_is_not_laid_out_before_it_begins() -> None:
    sampling = Counting(SAMPLES, 5, seed=0)
    step, _ = next(Batches(Numbered(), sampling, World(), None, workers=1).of_steps(0, 1000))
    assert step == 0
    assert sampling.asked < 10, "as many as the loader fetches ahead"


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
