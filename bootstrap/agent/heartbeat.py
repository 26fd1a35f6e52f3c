"""A node's heartbeat: its record, written again and again with a count that grows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.interface import Store


class Heartbeat:
    """A node's heartbeat, sent from a thread. ``record(beat)`` makes what is sent; it is called from the heart's own
    thread and from that of ``send``."""

    def __init__(self, store: Store, every_s: float, record: Callable[[int], NodeRecord]) -> None:
        self._store = store
        self._every_s = every_s
        self._record = record
        self._beat = 0
        self._lock = threading.Lock()
        self._paced = threading.Event()
        self._ended = False
        self.told_of_notice = False
        """The others can know that this node will be taken."""

    def send(self) -> None:
        """One beat now, because there is something new in it. Raises as ``Store.put`` does."""
        with self._lock:
            if self._ended:
                return
            self._beat += 1
            record = self._record(self._beat)
            self._store.put(layout.node(record.node), encode(record))
            self.told_of_notice = record.notice is not None

    def pace(self, every_s: float) -> None:
        """Beat that often from now on, beginning with a beat after that time."""
        self._every_s = every_s
        self._paced.set()

    def start(self, is_well: Callable[[], bool]) -> None:
        """Beat regularly from now on, as long as ``is_well``: an agent whose loop turns no more must not look alive, or
        nobody would take over from it."""
        threading.Thread(target=self._beat_on, args=(is_well,), name="heartbeat", daemon=True).start()

    def end(self) -> None:
        """The last beat has been sent when this returns: nothing overwrites what is said of the node from now on."""
        self.end_soon()
        with self._lock:
            pass

    def end_soon(self) -> None:
        """None is sent from now on but one that is on its way, which may take as long as the bucket does not answer."""
        self._ended = True

    def _beat_on(self, is_well: Callable[[], bool]) -> None:
        while not self._ended:
            if self._paced.wait(self._every_s):
                self._paced.clear()
            elif is_well():
                with contextlib.suppress(GpuctlError):
                    self.send()
