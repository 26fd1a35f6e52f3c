"""The state that is saved: a model whose parameters are spread as in a real one, and nothing that computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash
from torch import nn

GIB = 1 << 30
_ROW = 1024
_BLOCKS = 11
_BLOCK = (12, 4, 16, 16)
"""Matrices of a block: attention in and out, two of a perceptron."""
_LARGE = (128, 128, 64, 64, 64)
"""Embedding, head, three more."""
_ODD = (1, 3, 64, 257, 1000, 1024, 4096, 10007)
"""Numbers in the many small ones: scales, biases, norms, adapters."""


def shapes(size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of float32 parameters of ``size`` bytes in all. Of 1 GiB the largest are 128 MiB."""
    unit = size // 1024 // (4 * _ROW)
    left = size // 4
    for number, units in enumerate(_LARGE):
        yield f"large.{number}", (units * unit, _ROW)
        left -= units * unit * _ROW
    for block in range(_BLOCKS):
        for number, units in enumerate(_BLOCK):
            yield f"blocks.{block}.matrix.{number}", (units * unit, _ROW)
            left -= units * unit * _ROW
        for number in range(24):
            count = _ODD[(block + number) % len(_ODD)]
            yield f"blocks.{block}.small.{number}", (count,)
            left -= count
    yield "rest", (left,)


class Weights(nn.Module):
    """``size`` bytes of parameters, in memory that is touched already: each in its own, as in any model, or, if
    ``together``, all in one piece, so that it can be cut into parts without a copy."""

    def __init__(self, size: int, *, together: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.flat = torch.empty(size // 4 if together else 0)
        at = 0
        for name, shape in shapes(size):
            count = torch.Size(shape).numel()
            memory = self.flat[at : at + count] if together else torch.empty(count)
            memory.uniform_(-1, 1, generator=generator)
            *path, last = name.split(".")
            _module(self, path).register_parameter(last, nn.Parameter(memory.view(shape)))
            at += count

    def change(self) -> None:
        """Every number, and the random number generator: nothing can be carried over from the save before."""
        torch.rand(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.01)

    def wipe(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def digest(self) -> str:
        found = xxhash.xxh3_128()
        for parameter in self.parameters():
            found.update(memoryview(parameter.detach().numpy()).cast("B"))  # type: ignore[arg-type]  # as in staging
        return found.hexdigest()


def _module(root: nn.Module, path: list[str]) -> nn.Module:
    for name in path:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root
