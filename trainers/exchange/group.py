"""``GroupExchange``: workers that are the ranks of one torch process group. A loss ends all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.int8 import Int8
from gpuctl.trainers.compression.reducers import cast_mean, exact_mean, two_hop_mean
from gpuctl.trainers.data.sampling import mixed
from gpuctl.trainers.exchange.interface import Mean
from gpuctl.trainers.world import World

_PIECE_BYTES = 64 << 20
"""How much is sent at once: more would take that much more memory, and save nothing. A larger tensor travels alone."""
_SEED = "seed before the model is made: torch.manual_seed(0)"


class GroupExchange:
    """The mean over all ranks of ``group``; by default of the job's, and of this process alone if it has none.

    ``codec`` is what values are turned into before they travel; none: as they are.

    Raises ``BadInput`` in one of several workers that has no process group.
    """

    def __init__(self, codec: Int8 | Cast | None = None, group: dist.ProcessGroup | None = None) -> None:
        World.now()  # raises if this process has yet to join the others
        self._codec = codec
        self._group = group or (dist.group.WORLD if dist.is_initialized() else None)

    @property
    def worker(self) -> int:
        """See ``Exchange``."""
        return 0 if self._group is None else self._group.rank()

    @property
    def workers(self) -> int:
        """See ``Exchange``."""
        return 1 if self._group is None else self._group.size()

    def check_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``Exchange``."""
        if self._group is None or self.workers == 1:
            return
        ours = {name: (str(x.dtype), tuple(x.shape), _digest(x)) for name, x in tensors.items()}
        everyone: list[dict[str, tuple[str, tuple[int, ...], int]]] = [ours] * self.workers
        dist.all_gather_object(everyone, ours, group=self._group)
        for worker, theirs in enumerate(everyone):
            for name in dict.fromkeys([*everyone[0], *theirs]):
                first, other = everyone[0].get(name), theirs.get(name)
                if first is None or other is None:
                    raise BadInput(
                        f"worker {worker if other is None else 0} has no parameter {name!r}", "see its model"
                    )
                if first != other:
                    raise BadInput(f"parameter {name!r} is not the same on workers 0 and {worker} at the start", _SEED)

    def mean(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor], *, weight: float, told: Sequence[float], seed: int
    ) -> Mean:
        """See ``Exchange``."""
        if self._group is None or self.workers == 1:
            return Mean(list(tensors), list(exact), [list(told)])
        everyone = self._gathered([weight, *told], tensors[0].device)
        # Where all weights are the same this is 1, and nothing is rounded.
        factor = weight * self.workers / sum(of[0] for of in everyone)
        means = [self._means(xs, factor, seed, codec) for xs, codec in ((tensors, self._codec), (exact, None))]
        return Mean(means[0], means[1], [of[1:] for of in everyone])

    def _means(self, tensors: Sequence[Tensor], factor: float, seed: int, codec: Int8 | Cast | None) -> list[Tensor]:
        assert self._group is not None
        found: list[Tensor] = []
        for index, piece in enumerate(_pieces(tensors)):
            flat = [x.reshape(-1) if factor == 1 else x.reshape(-1) * factor for x in piece]
            match codec:
                case None:
                    means = exact_mean(flat, self._group)
                case Cast():
                    means = cast_mean(flat, codec, self._group)
                case Int8():
                    means = two_hop_mean(flat, codec, mixed(seed, index, self.worker), self._group)
            found += [mean.view(x.shape) for mean, x in zip(means, piece, strict=True)]
        return found

    def _gathered(self, values: Sequence[float], device: torch.device) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self.workers)]
        dist.all_gather(everyone, mine, group=self._group)
        return [of.tolist() for of in everyone]


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type that are sent together: the same on all workers, since it depends on the shapes alone."""
    piece: list[Tensor] = []
    size = 0
    for x in tensors:
        if piece and (x.dtype != piece[0].dtype or size + x.nbytes > _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(x)
        size += x.nbytes
    if piece:
        yield piece


def _digest(x: Tensor) -> int:
    values = x.detach().resolve_conj().resolve_neg().contiguous().cpu().flatten().view(torch.uint8)
    return xxhash.xxh3_64_intdigest(values.numpy().data)
