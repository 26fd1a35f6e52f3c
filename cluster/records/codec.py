"""Records as JSON."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gpuctl.cluster.errors import CorruptRecord

T = TypeVar("T")


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes | msgspec.Raw, kind: type[T], key: str) -> T:
    """Raises ``CorruptRecord`` naming ``key`` and, where the shape is wrong, the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        name = getattr(kind, "__name__", str(kind))  # a union has none
        raise CorruptRecord(
            f"{key} is not a {name}: {error}", "was it written by another version of gpuctl?"
        ) from error
