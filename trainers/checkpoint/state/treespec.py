"""A state dict as JSON and tensors. Never a pickle: write access to a bucket must not be code execution.

``flatten_state`` splits a nested value into a skeleton that JSON can hold and the tensors it refers to by name;
``unflatten_state`` puts them together again. Numbers, strings, bytes, lists, tuples, dicts (of any plain keys),
counters and NumPy arrays come back as they were; a NumPy scalar comes back as Python's.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpuctl.cluster.errors import BadInput


def flatten_state(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The skeleton of ``value``; its tensors go into ``tensors`` under dotted names that begin with ``name``.

    Raises ``BadInput`` naming the key of what cannot be kept.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [flatten_state(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, torch.Tensor | np.ndarray):
        return _pack_tensor(value, name, tensors)
    if isinstance(value, bytes):
        return {"kind": "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"kind": "tuple", "of": [flatten_state(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            "kind": kind,
            "of": [
                [flatten_state(k, name, tensors), flatten_state(v, f"{name}.{k}", tensors)] for k, v in value.items()
            ],
        }
    raise BadInput(
        f"{name!r} of the state to save is a {type(value).__qualname__}, which a checkpoint cannot hold",
        "keep numbers, strings, lists, tuples, dicts, arrays, tensors, or give it state_dict() and load_state_dict()",
    )


def unflatten_state(treespec: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that ``flatten_state`` took apart, with the tensors found in ``tensors``."""
    if isinstance(treespec, list):
        return [unflatten_state(item, tensors) for item in treespec]
    if not isinstance(treespec, dict):
        return treespec
    kind, of = treespec["kind"], treespec["of"]
    if kind == "tensor":
        return tensors[of]
    if kind == "array":
        return tensors[of].cpu().numpy()
    if kind == "bytes":
        return base64.b64decode(of)
    if kind == "tuple":
        return tuple(unflatten_state(item, tensors) for item in of)
    found = {unflatten_state(key, tensors): unflatten_state(item, tensors) for key, item in of}
    return Counter(found) if kind == "counter" else found


def _pack_tensor(value: torch.Tensor | np.ndarray[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> Any:
    kind = "tensor"
    if isinstance(value, np.ndarray):
        kind = "array"
        try:
            value = torch.from_numpy(value.copy())
        except TypeError:
            raise BadInput(f"{name!r} of the state to save is an array of {value.dtype}", "keep numbers") from None
    if name in tensors:
        raise BadInput(f"two tensors of the state to save are both called {name!r}", "rename one of their keys")
    tensors[name] = value
    return {"kind": kind, "of": name}
