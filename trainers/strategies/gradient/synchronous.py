"""``Synchronous``: θ ← θ − α · 1/N Σ gᵢ, the exact mean of all ranks' gradients, by DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpuctl.cluster.jobs.strategy import bucket_size

BUCKET_MB = 25.0
"""DDP's own."""


class Synchronous:
    """What ``Trainer`` does without a strategy: DDP as torch has it. Every other method is compared with it.

    Raises ``BadInput`` for a ``bucket_mb`` that is no positive number.
    """

    keeps_gradients = False

    def __init__(self, *, bucket_mb: float = BUCKET_MB) -> None:
        self.bucket_mb = bucket_size(bucket_mb)

    def __repr__(self) -> str:
        return "Synchronous()"

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Self:  # noqa: ARG002
        """See ``GradientExchange``: DDP takes the mean already."""
        return self

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """See ``GradientExchange``."""
        yield


def ddp(model: nn.Module, device: torch.device, bucket_mb: float = BUCKET_MB) -> DistributedDataParallel:
    """``model`` in DDP, for any method here."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=bucket_mb)
