"""``Codec``: a vector as bytes, of a number that depends on its length alone, so that all ranks agree on it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

ALIGN = 8
"""Bytes. What is encoded is as long as a multiple of this, so that several can lie in one buffer, each one aligned for
the widest number that it may hold."""


class Codec(Protocol):
    """Pure: the same vector and seed are the same bytes."""

    name: str
    """As ``--strategy`` has it."""
    sparse: bool
    """Whether the bytes hold only some of the values: then ranks exchange them as they are, since the sum over many
    ranks is a dense vector. Otherwise each rank adds up a part of the vector for all."""
    unbiased: bool
    """Whether what is decoded is right on the mean; if not, what was lost must be sent later (error feedback)."""

    def encode(self, x: Tensor, seed: int) -> Tensor:
        """``x``, of shape (n,) and a floating type, as ``wire_bytes(n, x.dtype)`` bytes: a ``uint8`` vector.

        ``seed`` is that of whatever is drawn; give another one in each step, on each rank and for each vector, also in
        its lower 32 bits, which are all that torch takes of it on a CPU.
        """
        ...

    def add(self, wire: Tensor, out: Tensor) -> None:
        """Add the vector that ``wire`` holds to ``out``, of the same shape and type as the one that was encoded."""
        ...

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """How many bytes ``n`` values of ``dtype`` take."""
        ...


def decode(codec: Codec, wire: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The vector of ``n`` values that ``wire`` holds."""
    out = torch.zeros(n, dtype=dtype, device=wire.device)
    codec.add(wire, out)
    return out


def aligned(size: int) -> int:
    """``size`` bytes, rounded up to ``ALIGN``."""
    return -(-size // ALIGN) * ALIGN
