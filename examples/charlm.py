"""A small transformer learns to write Python, letter by letter, in a training loop of your own.

Its text is the source of Python's standard library, which is on every machine that can run this. What gpuctl adds to
the loop are the lines with ``checkpointer`` in them: it goes on where the last machine left off.

    python charlm.py --checkpoints /tmp/charlm
    torchrun --nproc-per-node 2 charlm.py --checkpoints /tmp/charlm
    gpuctl train charlm.py
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gpuctl import Checkpointer, DiLoCo, First, LocalSGD, log_metrics, strategy

CONTEXT = 64
BYTES = 256


class CharLM(nn.Module):
    """Bytes in, logits of the next byte out: (batch, time) to (batch, time, 256)."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, BYTES)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        time = text.shape[1]
        hidden = self.letters(text) + self.places.weight[:time]
        logits: Tensor = self.head(self.blocks(hidden, mask=self.mask[:time, :time], is_causal=True))
        return logits


def main() -> None:
    options = parsed()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    text = corpus()
    torch.manual_seed(0)
    model = CharLM().to(device)
    way = strategy(options.strategy)
    outer = way if isinstance(way, (LocalSGD, DiLoCo)) else None  # workers train apart, and need no DDP
    learner = DistributedDataParallel(model) if dist.is_initialized() and outer is None else model
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    # A schedule that does not depend on --steps, so that a finished run can be given more of them.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    checkpointer = Checkpointer(options.checkpoints, every=options.checkpoint_every)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": First(optimizer) if outer else optimizer,
        "scheduler": scheduler,
    }
    if way and (outer or dist.is_initialized()):
        state["strategy"] = way.attach(learner, optimizer)
    start = checkpointer.restore(state) or 0
    places = outer.steps(options.steps) if outer else ((step, rank) for step in range(start, options.steps))
    for step, part in places:
        inputs, targets = batch(text, step, options.batch, part, world)
        loss = cross_entropy(learner(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log_metrics(step + 1, loss=loss, lr=scheduler.get_last_lr()[0])
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
        if outer is None or outer.after_step():
            checkpointer.step(outer.step if outer else step + 1, state)
    checkpointer.save(options.steps, state)
    checkpointer.wait()
    if rank == 0:
        print("".join(map(chr, written(model, b"def ", 120).tolist())))


def batch(text: Tensor, step: int, size: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the global batch of ``step``, which depends on the step alone, whatever the world."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator)[rank::world]
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def written(model: CharLM, begin: bytes, length: int) -> Tensor:
    """``begin`` and what the model makes of it, as ASCII codes."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(begin)], device=model.head.weight.device)
    for _ in range(length):
        odds = torch.softmax(model(text[:, -CONTEXT:])[0, -1, :128].cpu() / 0.7, dim=0)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=generator).to(text.device)[None]], dim=1)
    return text[0]


def corpus() -> Tensor:
    """Half a megabyte of the standard library, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = b"".join(path.read_bytes() for path in sorted(library.glob("[a-f]*.py")))
    return torch.frombuffer(bytearray(sources[:500_000]), dtype=torch.uint8)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=48, help="windows per step, over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps between two checkpoints")
    parser.add_argument("--strategy", help="such as diloco:every=50 or topk:ratio=0.01; by default gpuctl's, or none")
    parser.add_argument("--checkpoints", help="where they go outside of a gpuctl job: a folder or a bucket URL")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    # After main, when DDP is gone: a gloo group that DDP holds to the last can deadlock as it is freed (pytorch#56297).
    if dist.is_initialized():
        dist.destroy_process_group()
