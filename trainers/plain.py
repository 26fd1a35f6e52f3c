"""A state dict as JSON and tensors. Never a pickle: write access to a bucket must not be code execution.

``pack`` splits a nested value into a skeleton that JSON can hold and the tensors it refers to by name; ``unpack`` puts
them together again. Numbers, strings, bytes, lists, tuples, dicts (of any plain keys), counters and NumPy arrays come
back as they were; a NumPy scalar comes back as Python's.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpuctl.cluster.errors import BadInput


def pack(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The skeleton of ``value``; its tensors go into ``tensors`` under dotted names that begin with ``name``.

    Raises ``BadInput`` naming the key of what cannot be kept.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, torch.Tensor | np.ndarray):
        return _pack_tensor(value, name, tensors)
    if isinstance(value, bytes):
        return {"kind": "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"kind": "tuple", "of": [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            "kind": kind,
            "of": [[pack(k, name, tensors), pack(v, f"{name}.{k}", tensors)] for k, v in value.items()],
        }
    raise BadInput(
        f"{name!r} of the state to save is a {type(value).__qualname__}, which a checkpoint cannot hold",
        "keep numbers, strings, lists, tuples, dicts, arrays, tensors, or give it state_dict() and load_state_dict()",
    )


def unpack(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that ``pack`` took apart, with the tensors found in ``tensors``."""
    if isinstance(skeleton, list):
        return [unpack(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind, of = skeleton["kind"], skeleton["of"]
    if kind == "tensor":
        return tensors[of]
    if kind == "array":
        return tensors[of].cpu().numpy()
    if kind == "bytes":
        return base64.b64decode(of)
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in of)
    found = {unpack(key, tensors): unpack(item, tensors) for key, item in of}
    return Counter(found) if kind == "counter" else found


def names(skeleton: Any) -> list[str]:
    """Names of the tensors that ``skeleton`` refers to, in order."""
    if isinstance(skeleton, list):
        return [name for item in skeleton for name in names(item)]
    if not isinstance(skeleton, dict) or skeleton["kind"] == "bytes":
        return []
    if skeleton["kind"] in ("tensor", "array"):
        return [skeleton["of"]]
    return names(skeleton["of"])


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
