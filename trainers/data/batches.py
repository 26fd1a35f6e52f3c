"""Fetching the samples of a step: this rank's slice of each global batch, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from gpuctl.trainers.data.sampling import Sampling, slice_of
from gpuctl.trainers.world import World

MicroBatch = tuple[Tensor, Tensor, float]
"""Inputs, targets, and the part of the global batch that they are."""


class Batches:
    """Yields batches: whole ones at once from a ``TensorDataset``; anything else sample by sample, by ``workers`` if
    there are."""

    def __init__(
        self, dataset: Dataset[Any], sampling: Sampling, world: World, micro_batch: int | None, workers: int
    ) -> None:
        self._dataset = dataset
        self._sampling = sampling
        self._world = world
        self._workers = workers
        begin, end = slice_of(sampling.global_batch, world.rank, world.size)
        self._share = end - begin
        self._micro = min(micro_batch or self._share, self._share) or 1

    def of_steps(self, start: int, stop: int) -> Iterator[tuple[int, list[MicroBatch]]]:
        """(step, its micro-batches) for steps ``start`` to ``stop`` - 1."""
        if self._workers == 0 or isinstance(self._dataset, TensorDataset):
            for step in range(start, stop):
                yield step, self.of_step(step)
            return
        # The loader asks for the indices of coming steps while its workers fetch; tee keeps what lies between.
        ours, ahead = tee(self._indices(step) for step in range(start, stop))
        batches = (indices.tolist() for parts in ahead for indices in parts)
        loader = iter(DataLoader(self._dataset, batch_sampler=batches, num_workers=self._workers))
        for step, parts in enumerate(ours, start):
            yield step, [self._weighed(next(loader), len(indices)) for indices in parts]

    def of_step(self, step: int) -> list[MicroBatch]:
        return [self._weighed(self.fetch(self._dataset, part), len(part)) for part in self._indices(step)]

    def fetch(self, dataset: Dataset[Any], indices: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(dataset, TensorDataset):
            of_inputs, of_targets = dataset.tensors
            return of_inputs[indices], of_targets[indices]
        inputs, targets = default_collate([dataset[int(index)] for index in indices])
        return inputs, targets

    def _indices(self, step: int) -> tuple[Tensor, ...]:
        mine = self._sampling.slice(step, self._world.rank, self._world.size)
        if self._share == 0:
            # More ranks than samples: this one takes part in the exchange with a sample that counts for nothing.
            return (self._sampling.batch(step)[:1],)
        return torch.split(mine, self._micro) if self._micro < self._share else (mine,)

    def _weighed(self, batch: Any, count: int) -> MicroBatch:
        inputs, targets = batch
        return inputs, targets, (count if self._share else 0) / self._sampling.global_batch
