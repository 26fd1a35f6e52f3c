"""User data as the clouds take it."""

from __future__ import annotations

import gzip


def compressed(user_data: str) -> bytes:
    """User data as cloud-init is given it: it knows gzip, and a typical one shrinks to a third. The same bytes for the
    same text."""
    return gzip.compress(user_data.encode(), mtime=0)
