"""The mean of vectors over all ranks of a group, by what travels between them. All ranks get the same bits.

Each function takes the vectors of one rank, which are as many and as long on all of them, and is called by all ranks
of the group. Bytes that a rank sends, of N, where its vectors take S as they are and C encoded:

- ``exact_mean`` and ``cast_mean``: 2(N-1)/N × S or C. The all-reduce adds on the way.
- ``mean_made``: about 2 × S, and of the one rank where something is made of the mean more, so take turns.
- ``gathered_mean``: (N-1) × C. Each rank gets what all others have sent, and adds it up in the order of ranks.
- ``two_hop_mean``: 2(N-1)/N × C. Each rank adds up one part of the vectors for all, and sends it to all, encoded again
  (as torchft's ``allreduce_quantized`` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.codec import Codec
from gpuctl.trainers.compression.topk import TopK

Group = dist.ProcessGroup


def exact_mean(xs: Sequence[Tensor], group: Group) -> list[Tensor]:
    """In the type that the vectors have."""
    return _reduced(xs, xs[0].dtype, group) if xs else []


def cast_mean(xs: Sequence[Tensor], cast: Cast, group: Group) -> list[Tensor]:
    """In half the width; each comes back in the type that it had."""
    return _reduced(xs, cast.dtype, group) if xs else []


@dataclass(frozen=True, slots=True)
class Gathered:
    """What ``gathered_mean`` found out."""

    means: list[Tensor]
    sent: list[Tensor]
    """Of each vector, the bytes that this rank has sent."""
    is_finite: bool
    """Whether all that any rank has sent is."""


def gathered_mean(xs: Sequence[Tensor], codec: TopK, seed: int, group: Group) -> Gathered:
    """For sparse codecs."""
    sent = [codec.encode(x, _mixed(seed, index)) for index, x in enumerate(xs)]
    if not sent:
        return Gathered([], [], True)
    sizes = [wire.numel() for wire in sent]
    ours = torch.cat(sent)
    gathered = torch.empty(group.size() * ours.numel(), dtype=torch.uint8, device=ours.device)
    dist.all_gather(list(gathered.split(ours.numel())), ours, group)
    ranks = [of_rank.split(sizes) for of_rank in gathered.split(ours.numel())]
    means, sums = [], []
    for index, x in enumerate(xs):
        total = torch.zeros_like(x)
        for wires in ranks:
            codec.add(wires[index], total)
            sums.append(codec.values(wires[index], x.numel(), x.dtype).sum())
        means.append(total.div_(group.size()))
    return Gathered(means, sent, bool(torch.stack(sums).isfinite().all()))


def two_hop_mean(xs: Sequence[Tensor], codec: Codec, seed: int, group: Group) -> list[Tensor]:
    """For codecs that are as good for a sum as for what is added, and whose bytes are a fixed part of the vector."""
    if not xs:
        return []
    ranks = group.size()
    flat = torch.cat(list(xs))
    parts = _padded(flat, ranks).view(ranks, -1)
    length = parts.shape[1]
    wires = torch.stack([codec.encode(part, _mixed(seed, index)) for index, part in enumerate(parts)])
    received = torch.empty_like(wires)
    dist.all_to_all_single(received.view(-1), wires.view(-1), group=group)
    ours = torch.zeros(length, dtype=flat.dtype, device=flat.device)
    for wire in received:
        codec.add(wire, ours)
    wire = codec.encode(ours.div_(ranks), _mixed(seed, ranks))
    gathered = torch.empty(ranks * wire.numel(), dtype=torch.uint8, device=wire.device)
    dist.all_gather(list(gathered.split(wire.numel())), wire, group)
    mean = torch.zeros_like(parts)
    for part, wire in zip(mean, gathered.view(ranks, -1), strict=True):
        codec.add(wire, part)
    return list(mean.view(-1)[: flat.numel()].split([x.numel() for x in xs]))


def mean_made(
    xs: Sequence[Tensor], make: Callable[[list[Tensor]], list[Tensor]], root: int, group: Group
) -> list[Tensor]:
    """What ``make`` makes of the mean, in the same shapes, on rank ``root`` of the group: the same bits for all ranks,
    also where each would round in its own way, as unlike processors do."""
    if not xs:
        return []
    flat = torch.cat([x.reshape(-1) for x in xs]).div_(group.size())
    at = dist.get_global_rank(group, root)
    dist.reduce(flat, at, group=group)
    if group.rank() == root:
        parts = flat.split([x.numel() for x in xs])
        made = make([part.view(x.shape) for part, x in zip(parts, xs, strict=True)])
        flat = torch.cat([one.reshape(-1) for one in made])
    dist.broadcast(flat, at, group=group)
    return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in xs]), xs, strict=True)]


def two_hop_bytes(n: int, codec: Codec, ranks: int, dtype: torch.dtype = torch.float32) -> int:
    """What each rank sends in ``two_hop_mean`` of ``n`` values."""
    return 2 * (ranks - 1) * codec.wire_bytes(-(-n // ranks), dtype)


def _reduced(xs: Sequence[Tensor], dtype: torch.dtype, group: Group) -> list[Tensor]:
    flat = torch.cat(list(xs))
    # Divided before: the sum of many fp16 would be infinite.
    half = flat.div(group.size()).to(dtype)
    dist.all_reduce(half, group=group)
    return list(half.to(flat.dtype).split([x.numel() for x in xs]))


def _padded(flat: Tensor, ranks: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % ranks))


def _mixed(seed: int, index: int) -> int:
    """Another seed for each of several draws of one seed, also in its lower 32 bits, which are all that torch takes of
    it on a CPU."""
    return (seed * 1_000_003 + index) % 2**63
