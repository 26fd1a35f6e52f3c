"""``Int8``: one byte a value, rounded up or down at random so that it is right on the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from gpuctl.cluster.jobs.strategy import whole
from gpuctl.trainers.compression.codec import aligned

_LEVELS = 127


class Int8:
    """Each value as one of 255 steps between plus and minus the largest of its ``chunk``, with stochastic rounding: up
    with the probability of what is left of it (QSGD, Alistarh et al. 2017, arXiv:1610.02132, with one scale a chunk).

    So the mean of many is the value itself, and nothing has to be sent later. A smaller ``chunk`` is more exact and
    costs more: one scale, a float of 32 bits, each. A vector with an inf or NaN in it arrives as NaN in that chunk.

    Raises ``BadInput`` for a chunk that is no whole number from 1 on.
    """

    name = "int8"
    sparse = False
    unbiased = True

    def __init__(self, chunk: int = 256) -> None:
        self.chunk = whole(chunk, "chunk", least=1)

    def __repr__(self) -> str:
        return "Int8()"

    def encode(self, x: Tensor, seed: int) -> Tensor:
        """See ``Codec``."""
        n = x.numel()
        # In 16 bits there would be no room for what is rounded.
        rows = self._rows(x.to(torch.promote_types(x.dtype, torch.float32)))
        scales = rows.abs().amax(dim=1).to(torch.float32) / _LEVELS
        steps = rows / torch.where(scales > 0, scales, 1).unsqueeze(1)
        noise = torch.rand(
            steps.shape, dtype=steps.dtype, device=x.device, generator=torch.Generator(x.device).manual_seed(seed)
        )
        # The scale was rounded to 32 bits, so the largest value may be a little more than 127 of it.
        whole_steps = (steps + noise).floor().clamp(-_LEVELS, _LEVELS).nan_to_num(0.0).to(torch.int8)
        wire = torch.zeros(self.wire_bytes(n), dtype=torch.uint8, device=x.device)
        size = 4 * scales.numel()
        wire[:size] = scales.view(torch.uint8)
        wire[size : size + n] = whole_steps.view(-1)[:n].view(torch.uint8)
        return wire

    def add(self, wire: Tensor, out: Tensor) -> None:
        """See ``Codec``."""
        n, chunks = out.numel(), -(-out.numel() // self._chunk(out.numel()))
        scales = wire[: 4 * chunks].view(torch.float32)
        steps = self._rows(wire[4 * chunks : 4 * chunks + n].view(torch.int8))
        out += (steps * scales.to(out.dtype).unsqueeze(1)).view(-1)[:n]

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:  # noqa: ARG002
        """See ``Codec``; the same for all types."""
        return aligned(4 * -(-n // self._chunk(n)) + n)

    def _rows(self, x: Tensor) -> Tensor:
        """``x`` as rows of a chunk each, the last one filled up with zeros."""
        chunk = self._chunk(x.numel())
        return torch.nn.functional.pad(x, (0, -x.numel() % chunk)).view(-1, chunk)

    def _chunk(self, n: int) -> int:
        """No longer than the vector."""
        return max(1, min(self.chunk, n))
