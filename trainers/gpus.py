"""Which GPUs a process works on. They need not be its current device: a script that only moves its model to ``cuda:3``
leaves that at ``cuda:0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def gpus_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Those that ``tensors`` lie on, by number."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=lambda gpu: gpu.index)


def gpus_in_use() -> list[torch.device]:
    """Those on which this process holds memory, by number."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i)]


def wait_for(gpus: Sequence[torch.device]) -> None:
    """Until each has done all that it was given, on whichever stream."""
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
