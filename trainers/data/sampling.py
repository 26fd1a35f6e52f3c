"""Which samples make up a step: a function of (seed, step) only, never of the world.

Each epoch is a permutation of the data set, seeded by (seed, epoch), cut into global batches from the front; what is
left over at its end, less than a batch, is dropped. Step k (from 0) takes batch ``k % per_epoch`` of epoch
``k // per_epoch``. A data set smaller than one batch is refused. A rank takes its contiguous slice of the batch; where
the batch does not divide evenly, the first ranks take one sample more.
"""

from __future__ import annotations

import torch

from gpuctl.cluster.errors import BadInput

Place = tuple[int, int]
"""A step, and which rank's slice of its batch."""


class Sampling:
    """The order of ``samples`` samples in global batches of ``global_batch``."""

    def __init__(self, samples: int, global_batch: int, seed: int) -> None:
        if not 1 <= global_batch <= samples:
            raise BadInput(
                f"global_batch={global_batch} does not fit a data set of {samples} samples",
                f"use 1 to {samples}",
            )
        self._samples = samples
        self.global_batch = global_batch
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self.per_epoch = samples // global_batch

    def batch(self, step: int) -> torch.Tensor:
        """Indices of the global batch of ``step``, in order."""
        return self._cut(step, 0, self.global_batch)

    def slice(self, step: int, rank: int, world: int) -> torch.Tensor:
        """The part of ``batch(step)`` that ``rank`` of ``world`` takes."""
        return self._cut(step, *slice_of(self.global_batch, rank, world))

    def _cut(self, step: int, begin: int, end: int) -> torch.Tensor:
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        first = place * self.global_batch
        return self._order[first + begin : first + end]

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mixed(self._seed, epoch))
        return torch.randperm(self._samples, generator=generator)


def slice_of(length: int, rank: int, world: int) -> tuple[int, int]:
    """Bounds of the contiguous part of ``length`` things that ``rank`` of ``world`` takes."""
    share, more = divmod(length, world)
    begin = rank * share + min(rank, more)
    return begin, begin + share + (rank < more)


def mixed(*numbers: int) -> int:
    """A 63-bit seed in which every one of ``numbers`` counts, so that neighbours do not give related streams
    (splitmix64's finalizer, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFF_FFFF_FFFF_FFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFF_FFFF_FFFF_FFFF
        state ^= state >> 31
    return state >> 1
