"""The bytes of tensors as a checkpoint keeps them: in row-major order, conjugated and negated where a view says so."""

from __future__ import annotations

import torch

from gpuctl.cluster.checkpoints.manifest import TensorIndex
from gpuctl.cluster.errors import Damaged


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in memory as a checkpoint has them."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a plain tensor, as a view. One that is contiguous only because it has a single element, and may have
    any stride, included."""
    flat = tensor.reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def copy_bytes(tensor: torch.Tensor, low: int, high: int, out: torch.Tensor) -> None:
    """Bytes ``[low, high)`` of ``tensor``, in row-major order, to the bytes ``out``. Both ends are at whole elements.

    On the host there is no copy in between. Of what is not contiguous on a GPU torch makes one there, of these bytes.
    """
    if low >= high:
        return
    if is_plain(tensor):
        copy_flat(out, flat_bytes(tensor)[low:high])
        return
    rows = tensor if tensor.dim() else tensor.reshape(1)
    row = rows[0].numel() * rows.element_size()
    first, last = -(-low // row), high // row
    if first > last:  # within one row
        copy_bytes(rows[last], low - last * row, high - last * row, out)
        return
    begin, end = first * row - low, last * row - low
    if begin > 0:
        copy_bytes(rows[first - 1], row - begin, row, out[:begin])
    if begin < end:
        out[begin:end].view(rows.dtype).view(-1, *rows.shape[1:]).copy_(rows[first:last])
    if end < high - low:
        copy_bytes(rows[last], 0, high - last * row, out[end:])


def copy_flat(to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy between flat tensors of bytes of one length. torch copies numbers of eight bytes faster by a fifth."""
    if all(int(n) % 8 == 0 for n in (to.numel(), to.storage_offset(), source.storage_offset())):
        to, source = to.view(torch.int64), source.view(torch.int64)
    to.copy_(source, non_blocking=non_blocking)


def dtype_of(tensor: TensorIndex) -> torch.dtype:
    """Raises ``Damaged`` if this torch does not have it."""
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise Damaged(
            f"this version of torch has no dtype {tensor.dtype!r}", "use the version that wrote the checkpoint"
        )
    return found
