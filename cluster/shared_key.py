"""Proof that both ends of a connection know a shared key, which itself never crosses the wire.

Each end draws a nonce and sends it. Who knows the key can then make the connection's own key of the two nonces, and
with it the codes (HMAC-SHA256) of all that is said afterwards. A stranger who answers at the port, calls it, or plays
back what was said on another connection has no code that fits. What is said is not hidden: it holds no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets


def new_nonce() -> str:
    """A number that is used once: 128 random bits."""
    return secrets.token_hex(16)


class Session:
    """One connection's codes. ``caller_nonce`` is the nonce of the end that has opened it."""

    def __init__(self, key: str, caller_nonce: str, listener_nonce: str) -> None:
        self._key = _code(key.encode(), ["gpuctl", caller_nonce, listener_nonce])

    def code(self, *words: str | int) -> str:
        """The code of these words. The first says which end speaks, and one of them counts, or what was said once could
        be said again, or sent back."""
        return _code(self._key, words).hex()

    def fits(self, code: object, *words: str | int) -> bool:
        """Whether this is the code of these words."""
        return isinstance(code, str) and hmac.compare_digest(code.encode(), self.code(*words).encode())


def _code(key: bytes, words: list[str] | tuple[str | int, ...]) -> bytes:
    return hmac.digest(key, json.dumps(words).encode(), hashlib.sha256)
