"""``TopK``: the largest values of each chunk of a vector, and their places."""

from __future__ import annotations

import torch
from torch import Tensor

from gpuctl.cluster.jobs.strategy import ratio as checked_ratio
from gpuctl.cluster.jobs.strategy import topk_chunk
from gpuctl.trainers.compression.codec import aligned
from gpuctl.trainers.compression.packing import pack12, packed_size, unpack12

_PACKED = 4096


class TopK:
    """The part ``ratio`` of the values, those that are largest without their sign (Aji and Heafield 2017,
    arXiv:1704.05021; Alistarh et al. 2018, arXiv:1809.10505).

    They are chosen in each ``chunk`` of consecutive values on its own, at least one: that costs the same for a vector
    of any length, and a place within a chunk of 4096 takes 12 bits (up to 65,536: 16). Values travel as they are.

    Raises ``BadInput`` for a ratio outside of (0, 1], or a chunk outside of [2, 65536].
    """

    name = "topk"
    sparse = True
    unbiased = False

    def __init__(self, ratio: float, chunk: int = _PACKED) -> None:
        self.ratio = checked_ratio(ratio)
        self.chunk = topk_chunk(chunk)

    def __repr__(self) -> str:
        return f"TopK({self.ratio:g})"

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:  # noqa: ARG002
        """See ``Codec``; nothing is drawn."""
        chosen = self.places(x)
        wire = torch.zeros(self.wire_bytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        values = x[chosen].view(torch.uint8)
        wire[: values.numel()] = values
        places = self._packed(chosen % self.chunk)
        wire[values.numel() : values.numel() + places.numel()] = places
        return wire

    def add(self, wire: Tensor, out: Tensor) -> None:
        """See ``Codec``. A place is there once, so the sum does not depend on any order."""
        values, places = self.decode_sparse(wire, out.numel(), out.dtype)
        out.index_add_(0, places, values)

    def decode_sparse(self, wire: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The values that are in ``wire``, and their places in the vector of ``n`` values."""
        whole_chunks, in_each, in_last = self._counts(n)
        count = whole_chunks * in_each + in_last
        size = count * dtype.itemsize
        within = self._unpacked(wire[size:], count)
        chunks = torch.arange(whole_chunks + 1, device=wire.device).repeat_interleave(
            torch.tensor([in_each] * whole_chunks + [in_last], device=wire.device), output_size=count
        )
        return wire[:size].view(dtype), within + chunks * self.chunk

    def values(self, wire: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The values that are in ``wire``, wherever they belong."""
        whole_chunks, in_each, in_last = self._counts(n)
        return wire[: (whole_chunks * in_each + in_last) * dtype.itemsize].view(dtype)

    def places(self, x: Tensor) -> Tensor:
        """Where the values stand that are sent of ``x``, of shape (n,): chunk by chunk."""
        n, (whole_chunks, in_each, in_last) = x.numel(), self._counts(x.numel())
        size = x.abs()
        cut = whole_chunks * self.chunk
        rows = size[:cut].view(whole_chunks, self.chunk)
        starts = torch.arange(whole_chunks, device=x.device).unsqueeze(1) * self.chunk
        chosen = [(rows.topk(in_each, dim=1, sorted=False).indices + starts).view(-1)] if whole_chunks else []
        if n > cut:
            chosen.append(size[cut:].topk(in_last, sorted=False).indices + cut)
        return torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=x.device)

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """See ``Codec``."""
        whole_chunks, in_each, in_last = self._counts(n)
        count = whole_chunks * in_each + in_last
        return aligned(count * dtype.itemsize + self._places_size(count))

    def _counts(self, n: int) -> tuple[int, int, int]:
        """Whole chunks, values sent of each, values sent of what is left."""
        whole_chunks, left = divmod(n, self.chunk)
        return whole_chunks, self._count(self.chunk), self._count(left)

    def _count(self, length: int) -> int:
        return min(length, max(1, round(self.ratio * length)))

    def _places_size(self, count: int) -> int:
        return packed_size(count) if self.chunk <= _PACKED else 2 * count

    def _packed(self, places: Tensor) -> Tensor:
        if self.chunk <= _PACKED:
            return pack12(places)
        # As int16 the upper half is negative; the bytes are the same.
        return places.to(torch.int16).view(torch.uint8)

    def _unpacked(self, data: Tensor, count: int) -> Tensor:
        if self.chunk <= _PACKED:
            return unpack12(data, count)
        # What comes before are values of four or eight bytes, so this begins at a multiple of two.
        return data[: 2 * count].view(torch.int16).to(torch.int64) & 0xFFFF
