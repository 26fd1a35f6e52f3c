"""obstore's store, and what to do when it does not take our credentials any more.

The client asks a machine's identity (EC2's and ECS's metadata, EKS's tokens, Google's and Azure's) for new credentials
when the old ones have five minutes left, and the environment never. So a refusal means that they ended before their
time, or that nobody renews them. The store is then opened anew, which asks everybody anew, and the request is repeated.
If that is refused too, somebody may still fix it: for a while it counts as an outage.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from gpuctl.cluster.errors import GpuctlError, StoreError
from gpuctl.cluster.storage.error_mapping import expired, has_expired, in_our_words, shown

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_used_by: int | None = None
"""The process whose threads obstore runs on, once there was a first request."""


class StoreSession:
    """An open store at ``url``. ``reopen`` opens it anew, where that may help; for ``renewal_window_s`` after the first
    refusal new credentials may still come. Threads may share one."""

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        reopen: Callable[[], ObjectStore] | None,
        renewal_window_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._url = url
        self._reopen = reopen
        self._renewal_window_s = renewal_window_s
        self._now = now
        self._lock = threading.Lock()
        self._served = False
        self._refused_since: float | None = None

    def ask(self, key: str, call: Callable[[ObjectStore], T]) -> T:
        """What ``call`` returns, which makes a request about ``key`` of the store that it is given. It is called again
        with another one if the first refuses our credentials.

        Raises what a bucket's verbs raise (see ``bucket.Store``).
        """
        from obstore.exceptions import BaseError

        self._check_process()
        store = self.store
        try:
            try:
                answer = call(store)
            except BaseError as error:
                if self._reopen is None or not has_expired(error, self._served):
                    raise
                answer = call(self._renewed(store, self._reopen))
        except (BaseError, OSError, ValueError) as error:
            raise self._in_our_words(error, key) from error
        self._served, self._refused_since = True, None
        return answer

    def _renewed(self, refused: ObjectStore, reopen: Callable[[], ObjectStore]) -> ObjectStore:
        """Instead of ``refused``, which another thread may have replaced already."""
        with self._lock:
            if self.store is refused:
                self.store = reopen()
            return self.store

    def _in_our_words(self, error: Exception, key: str) -> GpuctlError:
        if not has_expired(error, self._served):
            return in_our_words(error, self._url, key)
        now = self._now()
        since = self._refused_since = self._refused_since or now
        return expired(error, self._url, None if now - since <= self._renewal_window_s else self._renewal_window_s)

    def _check_process(self) -> None:
        global _used_by
        _used_by = _used_by or os.getpid()
        if _used_by != os.getpid():
            raise StoreError(
                f"the bucket {shown(self._url)} was in use before this process was forked, so it cannot be used here",
                "open buckets in the child only, or use multiprocessing's 'spawn'",
            )
