"""``Exchange``: the mean of what all workers have, now and then. It alone knows who they are, and what travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """What all workers get, the same bits on each."""

    tensors: list[Tensor]
    """Σ wᵢ xᵢ / Σ wᵢ."""
    exact: list[Tensor]
    """The same of those that no codec touches."""
    told: list[list[float]]
    """What each worker has told beside, in their order."""


class Exchange(Protocol):
    """All workers make the same calls in the same order."""

    @property
    def worker(self) -> int:
        """This one's number, from 0."""
        ...

    @property
    def workers(self) -> int:
        """How many there are."""
        ...

    def check_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ``BadInput`` with the first name whose tensor is another one on another worker."""
        ...

    def mean(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor], *, weight: float, told: Sequence[float], seed: int
    ) -> Mean:
        """The mean of each of ``tensors``, weighted, and what the workers tell each other.

        Args:
            tensors: as many on all workers, of the same shapes and types; at least one.
            exact: the same, for what is small and must not be rounded.
            weight: of this worker's; the sum of all must not be zero.
            told: as many numbers on all workers.
            seed: of what a codec draws: the same on all workers, and another one for each mean.
        """
        ...
