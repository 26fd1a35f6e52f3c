"""Top-k with error feedback and PowerSGD as plain hooks of DDP's: what the frame's own are compared with.

By hand, without names, warm-up, checkpoints or a thread: each bucket is one vector, exchanged while backward waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gpuctl.trainers.compression.topk import TopK

CHUNK = 4096


def top_k(model: DistributedDataParallel, ratio: float) -> None:
    """The same chunks and places as ``TopK``'s, on each matrix."""
    codec = TopK(ratio, CHUNK)
    residuals: dict[int, Tensor] = {}
    ranks = dist.get_world_size()

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        small: list[tuple[int, Tensor]] = []
        large: list[tuple[int, Tensor]] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            (large if gradient.dim() > 1 else small).append((id(parameter), gradient))
        if small:
            flat = torch.cat([g for _, g in small]) / ranks
            dist.all_reduce(flat)
            for (_key, g), mean in zip(small, flat.split([g.numel() for _, g in small]), strict=True):
                g.copy_(mean)
        wires, xs = [], []
        for key, g in large:
            x = g.reshape(-1) + residuals[key] if key in residuals else g.reshape(-1).clone()
            wires.append(codec.encode(x))
            xs.append(x)
        ours = torch.cat(wires)
        gathered = torch.empty(ranks * len(ours), dtype=torch.uint8)
        dist.all_gather(list(gathered.split(len(ours))), ours)
        sizes = [len(wire) for wire in wires]
        of_ranks = [part.split(sizes) for part in gathered.split(len(ours))]
        for index, (key, g) in enumerate(large):
            total = torch.zeros_like(xs[index])
            for of_rank in of_ranks:
                codec.add(of_rank[index], total)
            left = xs[index].neg_()
            codec.add(wires[index], left)
            residuals[key] = left.neg_()
            g.copy_((total / ranks).view_as(g))
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)


def power_sgd(model: DistributedDataParallel, rank: int) -> None:
    """Algorithm 1 with warm start and error feedback. torch's own hook is no reference here: with several gradient
    buckets under way, its chained futures start collectives in another order on each rank, and gloo fails."""
    residuals: dict[int, Tensor] = {}
    qs: dict[int, Tensor] = {}

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        small: list[Tensor] = []
        large: list[tuple[int, Tensor]] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if gradient.dim() > 1:
                large.append((id(parameter), gradient))
            else:
                small.append(gradient)
        _mean(small)
        ms, ps = [], []
        for key, g in large:
            m = g + residuals[key] if key in residuals else g.clone()
            if key not in qs:
                qs[key] = torch.randn(g.shape[1], rank, generator=torch.Generator().manual_seed(g.shape[1]))
            ms.append(m)
            ps.append(m @ qs[key])
        _mean(ps)
        ps = [torch.linalg.qr(p).Q for p in ps]
        for (key, _g), m, p in zip(large, ms, ps, strict=True):
            qs[key] = m.T @ p
        _mean([qs[key] for key, _g in large])
        for (key, g), m, p in zip(large, ms, ps, strict=True):
            torch.matmul(p, qs[key].T, out=g)
            residuals[key] = m.sub_(g)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)


def _mean(tensors: Sequence[Tensor]) -> None:
    """In place, in one all-reduce."""
    if not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors]) / dist.get_world_size()
    dist.all_reduce(flat)
    for t, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(mean.view_as(t))


BARE: dict[str, Callable[[DistributedDataParallel], None]] = {
    "topk:ratio=0.01": lambda model: top_k(model, 0.01),
    "powersgd:rank=4": lambda model: power_sgd(model, 4),
}
