"""Top-k with error feedback and PowerSGD as plain hooks of DDP's: what the frame's own are compared with.

By hand, without names, warm-up, checkpoints or a thread: each bucket is one vector, exchanged while backward waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
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
    """torch's own, from its third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


BARE: dict[str, Callable[[DistributedDataParallel], None]] = {
    "topk:ratio=0.01": lambda model: top_k(model, 0.01),
    "powersgd:rank=4": lambda model: power_sgd(model, 4),
}
