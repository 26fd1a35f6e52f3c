"""Plain PyTorch: a DDP script that has never heard of gpuctl.

    python plain_ddp.py
    torchrun --nproc-per-node 2 plain_ddp.py
    gpuctl train plain_ddp.py

It keeps no checkpoints, so after the loss of a node it begins anew. ``charlm.py`` shows the few lines that change that.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    learner = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    torch.manual_seed(1 + rank)
    for step in range(1, 501):
        points = torch.rand(256, 2, device=device) * 2 - 1
        inside = (points.norm(dim=1, keepdim=True) < 0.7).float()
        loss = nn.functional.binary_cross_entropy_with_logits(learner(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
    # After main, when DDP is gone: a gloo group that DDP holds to the last can deadlock as it is freed (pytorch#56297).
    # torch.distributed.nn is imported above for its default arguments: made after the group, they would keep it, and
    # threads that can abort the process as it ends (pytorch#179291).
    if dist.is_initialized():
        dist.destroy_process_group()
