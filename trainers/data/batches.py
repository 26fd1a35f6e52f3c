"""Fetching the samples of a step: this rank's slice of each global batch, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.data.sampling import Place, Sampling, slice_of
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
        self._micro_batch = micro_batch
        self._ahead: Iterable[list[int]] = ()
        is_loaded = workers > 0 and not isinstance(dataset, TensorDataset)
        self._loader = (
            DataLoader(dataset, batch_sampler=_Ahead(self), num_workers=workers, persistent_workers=True)
            if is_loaded
            else None
        )

    def of(self, places: Iterable[Place]) -> Iterator[tuple[Place, list[MicroBatch]]]:
        """Each of ``places`` and its micro-batches."""
        if self._loader is None:
            for place in places:
                yield place, self.at(place)
            return
        # The loader asks for the indices of coming places while its workers fetch; tee keeps what lies between.
        ours, ahead = tee((place, self._indices(place)) for place in places)
        self._ahead = (indices.tolist() for _, parts in ahead for indices in parts)
        loader = iter(self._loader)
        for place, parts in ours:
            yield place, [self._weighed(next(loader), indices, place) for indices in parts]

    def at(self, place: Place) -> list[MicroBatch]:
        return [self._weighed(self.fetch(self._dataset, part), part, place) for part in self._indices(place)]

    def fetch(self, dataset: Dataset[Any], indices: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(dataset, TensorDataset):
            of_inputs, of_targets = dataset.tensors
            return of_inputs[indices], of_targets[indices]
        inputs, targets = default_collate([dataset[int(index)] for index in indices])
        return inputs, targets

    def _indices(self, place: Place) -> tuple[Tensor, ...]:
        step, slot = place
        mine = self._sampling.slice(step, slot, self._world.size)
        if len(mine) == 0:
            # More ranks than samples: this one takes part in the exchange with a sample that counts for nothing.
            return (self._sampling.batch(step)[:1],)
        micro = self._micro_batch or len(mine)
        return torch.split(mine, micro) if micro < len(mine) else (mine,)

    def _weighed(self, batch: Any, indices: Tensor, place: Place) -> MicroBatch:
        inputs, targets = batch
        begin, end = slice_of(self._sampling.global_batch, place[1], self._world.size)
        return inputs, targets, (len(indices) if begin < end else 0) / self._sampling.global_batch


class _Ahead:
    """The indices that the loader's workers fetch next: others each time that the loader begins anew."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches._ahead)


def length_of(dataset: Dataset[Any]) -> int:
    """Raises ``BadInput`` for a data set that has no length or no order."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise BadInput(
            f"a {type(dataset).__name__} cannot be indexed, so steps cannot be reproduced",
            "use a map-style data set, with __len__ and __getitem__",
        )
    return len(dataset)
