"""Which bytes of a state each rank writes, where torch.distributed.checkpoint plans the save, and how they are had.

DCP gives a tensor that several ranks hold alike to one of them, whole. That leaves the ranks uneven wherever one tensor
is large beside the rest, as an embedding is. So the large ones are taken out of the plan that DCP makes, laid end to
end, and cut into one stretch for each rank that holds them, so long that all have the same to write. Small ones, and
those that only one rank has, stay where DCP put them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.save.partition import Box, aligned, refuse_layout

SHARED_BYTES = 1 << 20
"""What is smaller is written by one rank. Tensors that ranks have each their own version of, though DCP takes them for
alike (generators' states, averages), are small, and stay of one piece so."""


@dataclass(frozen=True, slots=True)
class ItemRange:
    """Bytes ``[low, high)`` of what the planner finds for ``item``, in row-major order."""

    item: WriteItem
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank's share of what is cut."""

    cut: frozenset[MetadataIndex]
    """What this rank would have written whole."""
    ranges: tuple[ItemRange, ...]


def held(plan: SavePlan) -> tuple[MetadataIndex, ...]:
    """What a rank could write a stretch of. DCP drops an item from the plans of all ranks but one, so each rank says
    before that what it has."""
    return tuple(item.index for item in plan.items if _bytes_of(item) >= SHARED_BYTES)


def assign(plans: Sequence[SavePlan], holding: Sequence[Iterable[MetadataIndex]]) -> list[Assignment]:
    """Assign ranges to ranks: for each of ``plans``, which DCP has made, what of it is cut and which ranges its rank
    writes instead. ``holding`` is what ``held`` said of each rank's own plan."""
    ranks: dict[MetadataIndex, list[int]] = {}
    for rank, indices in enumerate(holding):
        for index in indices:
            ranks.setdefault(index, []).append(rank)
    groups: dict[tuple[int, ...], list[WriteItem]] = {}
    cut: list[set[MetadataIndex]] = [set() for _ in plans]
    loads = [0] * len(plans)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders = tuple(ranks.get(item.index, ()))
            if rank in holders and len(holders) > 1:
                groups.setdefault(holders, []).append(item)
                cut[rank].add(item.index)
            else:
                loads[rank] += _bytes_of(item)
    ranges: list[list[ItemRange]] = [[] for _ in plans]
    for holders, items in sorted(groups.items()):
        quotas = _quotas([loads[rank] for rank in holders], sum(map(_bytes_of, items)))
        for rank, quota, found in zip(holders, quotas, _cut(items, quotas), strict=True):
            ranges[rank] += found
            loads[rank] += quota
    return [Assignment(frozenset(of), tuple(found)) for of, found in zip(cut, ranges, strict=True)]


def ranges_of(plan: SavePlan, assignment: Assignment | None) -> list[ItemRange]:
    """All that a rank with this plan writes of tensors; ``None``: what the plan says, whole."""
    cut = assignment.cut if assignment else frozenset()
    whole = [item for item in plan.items if item.type != WriteItemType.BYTE_IO and item.index not in cut]
    return [*(ItemRange(item, 0, _bytes_of(item)) for item in whole), *(assignment.ranges if assignment else ())]


def box_of(item: WriteItem) -> Box:
    data = item.tensor_data
    assert data is not None, "an item that is no value is a tensor"
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return Box(dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def check(name: str, tensor: torch.Tensor, box: Box) -> None:
    """Raises ``BadInput`` if ``tensor`` is not what was planned as ``box``, or is of a kind that cannot be kept."""
    refuse_layout(name, tensor)
    found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if found != (box.dtype, box.sizes):
        raise BadInput(
            f"{name!r} of the state to save was planned as {box.dtype}{list(box.sizes)}"
            f" and is {found[0]}{list(found[1])}",
            "the planner must put the resulting dtype and shape into its plan",
        )


def _bytes_of(item: WriteItem) -> int:
    return 0 if item.type == WriteItemType.BYTE_IO else box_of(item).bytes


def _quotas(loads: Sequence[int], size: int) -> list[int]:
    """How ``size`` bytes are shared out so that what each has with its load is the same, as far as that can be."""
    order = sorted(range(len(loads)), key=lambda one: loads[one])
    level = 0
    for count in range(1, len(order) + 1):
        level = -(-(size + sum(loads[one] for one in order[:count])) // count)
        if count < len(order) and level <= loads[order[count]]:
            break
    quotas, left = [0] * len(loads), size
    for one in order:
        quotas[one] = min(left, max(0, level - loads[one]))
        left -= quotas[one]
    return quotas


def _cut(items: Sequence[WriteItem], quotas: Sequence[int]) -> Iterator[list[ItemRange]]:
    """The items end to end, cut into stretches of ``quotas`` bytes, each cut at a whole number of elements."""
    ends = list(accumulate(map(_bytes_of, items)))
    last = 0
    for quota in quotas:
        first, last = last, last + quota
        found = []
        for item, end in zip(items, ends, strict=True):
            size = _bytes_of(item)
            low, high = (aligned(at - (end - size), size) for at in (first, last))
            if low < high:
                found.append(ItemRange(item, low, high))
        yield found
