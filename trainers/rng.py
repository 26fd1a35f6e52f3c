"""The state of the random number generators of one process: Python's, NumPy's, torch's, and its GPU's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Plain values only (see ``plain``), so that any rank's states fit into one small file."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if _on_gpu():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and _on_gpu():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, np.asarray(keys, dtype=np.uint32).tobytes(), *rest)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
