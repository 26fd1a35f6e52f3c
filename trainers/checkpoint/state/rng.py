"""The state of the random number generators of one process: Python's, NumPy's, torch's, and its GPUs'."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def rng_state(gpus: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Plain values only (see ``treespec``), so that any rank's states fit into one small file.

    ``gpus`` are those that the training runs on; where none is named, the current device, if CUDA is in use.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if used := _used(gpus):
        state["cuda"] = [torch.cuda.get_rng_state(gpu).numpy().tobytes() for gpu in used]
    return state


def set_rng_state(state: dict[str, Any], gpus: Sequence[torch.device] = ()) -> None:
    """The n-th of ``gpus`` goes on as the n-th did, whatever their numbers: another node may have others."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    for gpu, told in zip(_used(gpus), state.get("cuda", ()), strict=False):
        torch.cuda.set_rng_state(_tensor(told), gpu)


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, np.asarray(keys, dtype=np.uint32).tobytes(), *rest)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _used(gpus: Sequence[torch.device]) -> Sequence[torch.device]:
    if gpus or not torch.cuda.is_initialized():
        return gpus
    return (torch.device("cuda", torch.cuda.current_device()),)
