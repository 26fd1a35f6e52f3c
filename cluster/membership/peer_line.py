"""A connection between two agents on which nothing counts that does not come from one with the cluster's token.

JSON lines. Each end begins with a nonce. Every later line is a word and its code, which proves that whoever says it
knows the token and says it now, on this connection (see ``shared_key``). The token itself is never sent: whoever
reaches the port, listens to what passes or answers in an agent's place learns nothing and can say nothing.
"""

from __future__ import annotations

import asyncio
import json

from gpuctl.cluster.shared_key import Session, new_nonce

LINE_LIMIT = 4096
"""Bytes of a line; a longer one is a ``ValueError``."""
NO_PROOF = (TimeoutError, OSError, ValueError, KeyError, TypeError, RecursionError)
"""All that can be raised while a line is read that a stranger has written."""


class PeerLine:
    """One end of such a connection. ``calls``: it is the end that has opened it. Call ``begin`` first."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, calls: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._own, self._other = ("caller", "listener") if calls else ("listener", "caller")
        self._session: Session | None = None
        self._said = 0
        self._heard = 0

    async def begin(self, token: str) -> None:
        """Exchange nonces, the caller's first. Raises one of ``NO_PROOF``."""
        own = new_nonce()
        if self._own == "caller":
            self._write(own)
        theirs = json.loads(await self._reader.readline())
        if not isinstance(theirs, str):
            raise TypeError("not a nonce")
        if self._own == "caller":
            self._session = Session(token, own, theirs)
        else:
            self._session = Session(token, theirs, own)
            self._write(own)

    def say(self, word: str) -> None:
        """Raises ``OSError`` if the connection broke."""
        assert self._session is not None
        self._said += 1
        self._write([word, self._session.code(self._own, self._said, word)])

    async def hear(self) -> str:
        """The next word; empty once the other end has closed. Raises one of ``NO_PROOF``, then close it: ``ValueError``
        for a word that comes from a stranger."""
        assert self._session is not None
        line = await self._reader.readline()
        if not line:
            return ""
        word, code = json.loads(line)
        self._heard += 1
        if not isinstance(word, str) or not self._session.fits(code, self._other, self._heard, word):
            raise ValueError("the code does not fit")
        return word

    def close(self) -> None:
        self._writer.close()

    def _write(self, what: object) -> None:
        self._writer.write(json.dumps(what).encode() + b"\n")
