"""What a checkpoint keeps of an item that is no tensor, read without torch.

``trainers.checkpoint.state.treespec`` makes such skeletons.
"""

from __future__ import annotations

from typing import Any


def tensor_names(treespec: Any) -> list[str]:
    """The names of the tensors that ``skeleton`` refers to, in order."""
    if isinstance(treespec, list):
        return [name for item in treespec for name in tensor_names(item)]
    if not isinstance(treespec, dict) or treespec["kind"] == "bytes":
        return []
    if treespec["kind"] in ("tensor", "array"):
        return [treespec["of"]]
    return tensor_names(treespec["of"])


def for_people(treespec: Any, named: dict[str, str]) -> Any:
    """The values as plain JSON: dicts have their keys as text, tuples are lists, bytes are base64, and where a tensor
    stands there is ``{"tensor": name}`` with its name in ``named``."""
    if isinstance(treespec, list):
        return [for_people(item, named) for item in treespec]
    if not isinstance(treespec, dict):
        return treespec
    kind, of = treespec["kind"], treespec["of"]
    if kind in ("tensor", "array"):
        return {"tensor": named[of]}
    if kind == "bytes":
        return of
    if kind == "tuple":
        return [for_people(item, named) for item in of]
    return {_text(for_people(key, named)): for_people(item, named) for key, item in of}


def _text(key: Any) -> str:
    return key if isinstance(key, str) else str(key)
