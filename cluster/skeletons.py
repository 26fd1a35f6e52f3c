"""What a checkpoint keeps of an item that is no tensor, read without torch. ``trainers.plain`` makes such skeletons."""

from __future__ import annotations

from typing import Any


def tensor_names(skeleton: Any) -> list[str]:
    """Of the tensors that ``skeleton`` refers to, in order."""
    if isinstance(skeleton, list):
        return [name for item in skeleton for name in tensor_names(item)]
    if not isinstance(skeleton, dict) or skeleton["kind"] == "bytes":
        return []
    if skeleton["kind"] in ("tensor", "array"):
        return [skeleton["of"]]
    return tensor_names(skeleton["of"])


def for_people(skeleton: Any, named: dict[str, str]) -> Any:
    """As JSON that anybody reads: dicts have their keys as text, tuples are lists, bytes are base64, and where a tensor
    stands there is ``{"tensor": name}`` with its name in ``named``."""
    if isinstance(skeleton, list):
        return [for_people(item, named) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind, of = skeleton["kind"], skeleton["of"]
    if kind in ("tensor", "array"):
        return {"tensor": named[of]}
    if kind == "bytes":
        return of
    if kind == "tuple":
        return [for_people(item, named) for item in of]
    return {_text(for_people(key, named)): for_people(item, named) for key, item in of}


def _text(key: Any) -> str:
    return key if isinstance(key, str) else str(key)
