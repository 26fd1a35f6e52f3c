"""Who builds an environment: one node of all that want it, as long as it shows that it is at it.

Nothing depends on there being only one. Two that build at once, because one seemed to be gone, get the same
environment, and the registry keeps the first.
"""

from __future__ import annotations

import contextlib
import threading

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import CorruptRecord, GpuctlError
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.environments import Environment, EnvironmentBuild
from gpuctl.cluster.storage.interface import Store

_BEAT_S = 5.0
_SILENT_S = 30.0
"""Without a new beat, by the clock of whoever waits, after which another node builds."""


class BuildClaim:
    """This node's claim to build what one request asks for.

    Args:
        store: the cluster's bucket.
        request: digest of the request.
        own: what this node would write.
    """

    def __init__(self, store: Store, request: str, own: EnvironmentBuild, clock: Clock) -> None:
        self._store = store
        self._key = layout.environment_build(request)
        self._own = own
        self._clock = clock
        self._seen: tuple[str, str, int] | None = None
        self._seen_at = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> bool:
        """Whether this node builds now. Ask again while another does."""
        if self._store.create(self._key, encode(self._own)):
            return True
        other = self.holder()
        if other is None:
            return False  # it has just ended
        if (other.node, other.incarnation) == (self._own.node, self._own.incarnation):
            return True
        mark = (other.node, other.incarnation, other.beat)
        if mark != self._seen:
            self._seen, self._seen_at = mark, self._clock.monotonic()
        if other.node != self._own.node and self._clock.monotonic() - self._seen_at < _SILENT_S:
            return False
        self._store.put(self._key, encode(self._own))  # it is gone, or was an earlier life of this very node
        return True

    def holder(self) -> EnvironmentBuild | None:
        """Who builds, and how far that is."""
        data = self._store.get(self._key)
        if data is None:
            return None
        try:
            return decode(data, EnvironmentBuild, self._key)
        except CorruptRecord:  # another version of gpuctl may be at it
            return EnvironmentBuild(node="", incarnation="", beat=0)

    def tell_built(self, environment: Environment) -> None:
        """It can be fetched from this node, though not yet from the bucket."""
        self._put(replace(self._own, built=environment))

    def hold(self) -> None:
        """Begin to show that this node is at it."""
        self._beating = threading.Thread(target=self._beat, name="environment-claim", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Show that it is not any more."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
        with contextlib.suppress(GpuctlError):
            self._store.delete([self._key])

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self._put(self._own)

    def _put(self, claim: EnvironmentBuild) -> None:
        with self._lock, contextlib.suppress(GpuctlError):
            self._own = replace(claim, beat=self._own.beat + 1, built=claim.built or self._own.built)
            self._store.put(self._key, encode(self._own))
