"""DiLoCo in a training loop of your own: each worker trains by itself, and all of them meet once in a while.

A small network learns how many of eight pairs of bits agree. Between two meetings nothing is exchanged, so that the
links between the nodes may be slow.

    torchrun --nproc-per-node 2 diloco.py --checkpoints /tmp/diloco
    gpuctl train diloco.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpuctl import Checkpointer, DiLoCo, First, log_metrics

BATCH = 64
"""Samples of each worker in a step."""


def main() -> None:
    options = parsed()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)  # all workers begin with the same weights
    net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    diloco = DiLoCo(every=options.every).attach(net, optimizer)

    checkpointer = Checkpointer(options.checkpoints, every=options.checkpoint_every)
    # Each worker has an optimizer of its own; a checkpoint keeps the first one's, for all to go on from.
    state = {"model": net, "optimizer": First(optimizer), "diloco": diloco}
    checkpointer.restore(state)
    for step, worker in diloco.steps(options.steps):
        inputs, targets = batch(step, worker)
        loss = cross_entropy(net(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if diloco.after_step():  # all workers have the same weights now
            log_metrics(diloco.step, loss=loss)
            checkpointer.step(diloco.step, state)
    checkpointer.save(options.steps, state)
    checkpointer.wait()
    if diloco.place[1] == 0:
        inputs, targets = batch(-1, 0, 2000)
        right = (net(inputs.to(device)).argmax(1).cpu() == targets).float().mean()
        print(f"right: {right:.3f}", flush=True)


def batch(step: int, worker: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """What ``worker`` learns from in ``step``: bits, and the class of how many pairs agree."""
    generator = torch.Generator().manual_seed((step + 1) * 1024 + worker)
    bits = torch.randint(0, 2, (size, 16), generator=generator)
    return bits.float() * 2 - 1, (bits[:, :8] == bits[:, 8:]).sum(1).clamp(1, 8) - 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each worker")
    parser.add_argument("--every", type=int, default=50, help="steps between two meetings of the workers")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two checkpoints, at meetings")
    parser.add_argument("--checkpoints", help="where they go outside of a gpuctl job: a folder or a bucket URL")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
