"""A pulled checkpoint as PyTorch's own files.

The tensors are put together in a scratch file that is mapped into memory, and written from there, so that neither
format needs as much memory as the model is large. It needs twice the room on the disk meanwhile.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gpuctl.cluster.checkpoints.export.pull import OnBytes, OpenCheckpoint, file_name
from gpuctl.cluster.checkpoints.export.reassembly import byte_size
from gpuctl.cluster.checkpoints.manifest import TensorIndex
from gpuctl.cluster.errors import Damaged
from gpuctl.trainers.checkpoint.save.partition import padded
from gpuctl.trainers.checkpoint.state.treespec import unflatten_state
from gpuctl.trainers.checkpoint.tensor_bytes import dtype_of


def write_torch(opened: OpenCheckpoint, folder: Path, on_bytes: OnBytes) -> None:
    """``<item>.pt`` for each item of the state: what ``torch.load(path, weights_only=True)`` gives is what its
    ``load_state_dict`` takes. Arrays become tensors, since ``weights_only`` lets no arrays pass."""
    with _state(opened, folder, on_bytes) as state, _os_errors():
        for item, value in state.items():
            # Through a file of ours: of one that torch opens by itself, it does not tell what went wrong.
            with (folder / f"{file_name(item)}.pt").open("wb") as file:
                torch.save(value, file)


def write_dcp(opened: OpenCheckpoint, folder: Path, on_bytes: OnBytes) -> None:
    """What ``torch.distributed.checkpoint.load`` reads, on any number of ranks."""
    with _state(opened, folder, on_bytes) as state, _os_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@contextmanager
def _state(opened: OpenCheckpoint, folder: Path, on_bytes: OnBytes) -> Iterator[dict[str, Any]]:
    """The state, nested as it was given to ``Checkpointer``, with its tensors in a mapped file."""
    wanted = {name: tensor for item in opened.treespecs for name, tensor in opened.tensors(item).items()}
    reassembly = opened.reassembly()
    places: dict[str, int] = {}
    end = 0
    scratch = folder / "scratch"
    with scratch.open("w+b") as file:
        scratch.unlink()
        for name, tensor in wanted.items():
            places[name] = end
            reassembly.add_tensor(name, file.fileno(), end)
            end += padded(byte_size(tensor))
        file.truncate(max(end, 1))
        reassembly.fetch(on_bytes)
        memory = mmap.mmap(file.fileno(), 0)
        tensors = {name: _tensor(memory, places[name], tensor) for name, tensor in wanted.items()}
        yield {item: unflatten_state(_without_arrays(treespec), tensors) for item, treespec in opened.treespecs.items()}


@contextmanager
def _os_errors() -> Iterator[None]:
    """A disk that is full reaches the caller as the ``OSError`` that it is: torch's writer complains of what follows
    from it."""
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        cause: BaseException | None = error
        if isinstance(error, CheckpointException):
            cause = next(failure for failure, _ in error.failures.values())
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from error


def _tensor(memory: mmap.mmap, at: int, tensor: TensorIndex) -> torch.Tensor:
    """A storage of its own, of its own size: torch writes storages."""
    dtype = dtype_of(tensor)
    size = byte_size(tensor)
    if size != dtype.itemsize * prod(tensor.shape):
        raise Damaged(f"a tensor of {list(tensor.shape)} {tensor.dtype} has {size} bytes")
    if not size:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at).view(dtype).reshape(tensor.shape)


def _without_arrays(treespec: Any) -> Any:
    if isinstance(treespec, list):
        return [_without_arrays(item) for item in treespec]
    if not isinstance(treespec, dict):
        return treespec
    kind, of = treespec["kind"], treespec["of"]
    if kind in ("tensor", "array"):
        return {"kind": "tensor", "of": of}
    return treespec if kind == "bytes" else {"kind": kind, "of": _without_arrays(of)}
