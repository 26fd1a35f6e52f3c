"""``Cast``: numbers of half the width, added up in that width."""

from __future__ import annotations

from typing import Literal

import torch

from gpuctl.cluster.errors import BadInput

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast:
    """Values travel as ``bf16`` (the range of 32 bits, 8 bits of precision) or ``fp16`` (11 bits, at most 65504).

    Unlike a ``Codec``'s bytes these can be added on the way, by the all-reduce itself, and each hop rounds. Each rank
    divides by the number of ranks before, or the sum of many fp16 would be infinite. Raises ``BadInput`` for another
    name.
    """

    def __init__(self, dtype: Literal["bf16", "fp16"]) -> None:
        if dtype not in _DTYPES:
            raise BadInput(f"Cast({dtype!r}) is not a type to cast to", f"use one of {', '.join(_DTYPES)}")
        self.name = dtype
        self.dtype = _DTYPES[dtype]

    def __repr__(self) -> str:
        return f"Cast({self.name!r})"

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:  # noqa: ARG002
        """How many bytes ``n`` values take, whatever ``dtype`` they had."""
        return n * self.dtype.itemsize
