"""Forward and backward over the micro-batches of one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpuctl.trainers.data.batches import MicroBatch

Parts = list[tuple[Tensor, float]]
"""Of a rank's loss in one step: the mean over each micro-batch, and the part of the global batch that this is. Summed
up over all ranks they are the global mean."""

_AS_IT_IS = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the mean over the global batch, however it is divided."""

    model: nn.Module
    """What forward is called on: under DDP, whose backward exchanges gradients."""
    loss: Callable[[Tensor, Tensor], Tensor]
    device: torch.device
    ranks: int
    dtype: torch.dtype | None
    """Of ``autocast``; none for the parameters' own."""
    scaler: torch.GradScaler | None
    """Of fp16."""

    def accumulate(self, micro_batches: list[MicroBatch]) -> Parts:
        """One backward each; the gradients are exchanged with the last one only. Returns this rank's parts of the loss.

        DDP takes the mean over the ranks, hence their number. Where that makes 1, as for even slices, nothing is
        multiplied: in a small model each operation counts, and is slow where the step has filled the processor's cache.
        """
        parts = []
        last = len(micro_batches) - 1
        for index, (inputs, targets, weight) in enumerate(micro_batches):
            with _AS_IT_IS if index == last else self._apart():
                with _AS_IT_IS if self.dtype is None else torch.autocast(self.device.type, self.dtype):
                    output = self.model(inputs.to(self.device, non_blocking=True))
                    loss = self.loss(output, targets.to(self.device, non_blocking=True))
                factor = weight * self.ranks
                scaled = loss if factor == 1 else loss * factor
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            parts.append((loss.detach(), weight))
        return parts

    def _apart(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else _AS_IT_IS


def normalized(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """As parts of what they are together, for a rank whose gradients are its own."""
    total = sum(weight for _, _, weight in micro_batches)
    return [(inputs, targets, weight / total) for inputs, targets, weight in micro_batches]


def summed(parts: Parts) -> Tensor:
    """This rank's part of the mean loss, in 32 bits at least."""
    total: Tensor | None = None
    for loss, weight in parts:
        part = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight
        total = part if total is None else total + part
    assert total is not None, "a step has a micro-batch on every rank"
    return total
