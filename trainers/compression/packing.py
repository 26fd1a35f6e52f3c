"""Numbers below 4096 in 12 bits each, as Templar packs the positions of its gradients (tplr/compress.py)."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(count: int) -> int:
    """Bytes that ``count`` numbers of 12 bits take."""
    return (3 * count + 1) // 2


def pack12(numbers: Tensor) -> Tensor:
    """Integers in [0, 4096), of shape (n,), as a ``uint8`` vector: two of them in three bytes."""
    pairs = torch.nn.functional.pad(numbers, (0, numbers.numel() % 2)).view(-1, 2)
    low, high = pairs[:, 0], pairs[:, 1]
    three = torch.stack((low & 0xFF, (low >> 8) | ((high & 0xF) << 4), high >> 4), dim=1)
    return three.to(torch.uint8).view(-1)[: packed_size(numbers.numel())]


def unpack12(data: Tensor, count: int) -> Tensor:
    """``count`` numbers from what ``pack12`` made of them, as ``int64``."""
    three = torch.nn.functional.pad(data[: packed_size(count)], (0, count % 2)).view(-1, 3).to(torch.int64)
    low = three[:, 0] | ((three[:, 1] & 0xF) << 8)
    high = (three[:, 1] >> 4) | (three[:, 2] << 4)
    return torch.stack((low, high), dim=1).view(-1)[:count]
