"""The nearer copies of the last checkpoint, as a worker sees them: what is uploaded is also put on this node's disk and
sent to the neighbour (see ``cluster.checkpoints.replica_layout``), and a restore looks there first.

A copy is a favour. Where one cannot be made, a line says why, and that place gets no more of them until the next round.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpuctl.cluster.checkpoints import replica_layout
from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Part
from gpuctl.cluster.checkpoints.replica_layout import ReplicaMap
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.shared_key import Session, new_nonce
from gpuctl.cluster.worker_context import TIERS, WorkerContext

_SILENT_S = 10.0
OWN = "this node"


class ReplicaWriter:
    """Writes one worker's parts to this node's disk and to a peer's, in one round. Thread-safe."""

    def __init__(
        self, places: ReplicaMap, local_rank: int, say: Callable[[str], None], silent_s: float = _SILENT_S
    ) -> None:
        self._map = places
        self._folder = Path(places.folder)
        self._tidies = local_rank == 0
        self._say = say
        self._lock = threading.Lock()
        self._dropped: set[str] = set()
        self._last: str | None = None
        self._lines = _Connections(places, silent_s)

    @classmethod
    def of(cls, context: WorkerContext, say: Callable[[str], None]) -> ReplicaWriter | None:
        """``None`` if the agent has told of none."""
        try:
            places = msgspec.json.decode((context.round_dir / TIERS).read_bytes(), type=ReplicaMap)
        except (OSError, msgspec.MsgspecError):
            return None
        return cls(places, int(os.environ.get("LOCAL_RANK", "0")), say)

    def keep(self, save: str, part: Part, data: memoryview) -> tuple[str, ...]:
        """Copy a part of ``save``; the nodes that have it now."""
        places = [self._map.node] if self._map.neighbour is None else [self._map.node, self._map.neighbour]
        return tuple(node for node in places if self._put(node, save, part, data))

    def restored(self, save: str) -> None:
        """What is copied next may share parts with ``save``."""
        self._last = save

    def committed(self, save: str) -> None:
        """``save`` is the last checkpoint: its copies stay, and those before go."""
        self._last = save
        if self._tidies:
            with contextlib.suppress(OSError):
                for gone in replica_layout.outdated([path.name for path in self._folder.iterdir()], save):
                    shutil.rmtree(self._folder / gone, ignore_errors=True)

    def sources(self, entry: CheckpointEntry) -> list[DiskSource | PeerSource]:
        """Where to look for its parts, the nearest first."""
        rooms = threading.local()
        others = [node for node in self._map.places if node != self._map.node]
        return [
            DiskSource(self._folder, entry.path, rooms),
            *(PeerSource(node, self._lines, entry.path, rooms) for node in others),
        ]

    def _put(self, node: str, save: str, part: Part, data: memoryview) -> bool:
        if node in self._dropped:
            return False
        put = self._put_here if node == self._map.node else self._send
        try:
            put(save, part, data)
        except (OSError, http.client.HTTPException) as error:
            with self._lock:
                said = node in self._dropped
                self._dropped.add(node)
            if not said:
                where = "this node" if node == self._map.node else f"the peer {node}"
                self._say(f"no more replicas of checkpoints on {where}: {error}; checkpoints are still in the bucket")
            return False
        return True

    def _put_here(self, save: str, part: Part, data: memoryview) -> None:
        path = replica_layout.path_of(self._folder, save, part.key)
        if self._last is None or not replica_layout.link(
            path, replica_layout.path_of(self._folder, self._last, part.key)
        ):
            replica_layout.write(path, len(data), [data])

    def _send(self, save: str, part: Part, data: memoryview) -> None:
        assert self._map.neighbour is not None
        what, status = f"{save}/{part.key.replace('/', '+')}", 0
        if self._last is not None and not part.key.startswith(f"{save}/"):  # an earlier save has written it
            with self._lines.ask(self._map.neighbour, "PUT", what, {"X-Same-As": self._last}) as answer:
                status = answer.status
        if status != 201:
            with self._lines.ask(self._map.neighbour, "PUT", what, {}, data) as answer:
                status = answer.status
        if status != 201:
            raise OSError("its disk is full" if status == 507 else f"it answered {status}")


class DiskSource:
    """Reads parts from this node's disk. ``rooms`` holds each thread's memory, which is used again: new one costs a
    multiple."""

    name = OWN

    def __init__(self, folder: Path, save: str, rooms: threading.local) -> None:
        self._folder = folder
        self._save = save
        self._rooms = rooms

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        """See ``sources.Source``."""
        room = _room(self._rooms)
        try:
            with replica_layout.path_of(self._folder, self._save, part.key).open("rb", buffering=0) as file:
                file.seek(low)
                while low < high and (size := _fill(room[: high - low], file.readinto)):
                    yield room[:size]
                    low += size
        except (OSError, GpuctlError):
            return  # the next source has it, or names what is missing


class PeerSource:
    """Reads parts from another node of this round."""

    def __init__(self, node: str, lines: _Connections, save: str, rooms: threading.local) -> None:
        self.name = node
        self._lines = lines
        self._save = save
        self._rooms = rooms
        self._silent = False

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        """See ``sources.Source``."""
        if self._silent or self.name not in part.nodes:
            return
        room, wanted = _room(self._rooms), {"Range": f"bytes={low}-{high - 1}"}
        try:
            with self._lines.ask(self.name, "GET", f"{self._save}/{part.key.replace('/', '+')}", wanted) as answer:
                while answer.status == 206 and (size := _fill(room, answer.readinto)):
                    yield room[:size]
        except (OSError, http.client.HTTPException):
            self._silent = True  # the other threads do not wait for it as well


class ReplicaConnection(http.client.HTTPConnection):
    """A connection to one node's replica server (see there)."""

    def __init__(self, place: str, token: str, silent_s: float) -> None:
        super().__init__(place, timeout=silent_s)
        self._token = token
        self._session = Session("", "", "")
        self._asked = 0

    def ask(self, method: str, path: str, headers: dict[str, str], body: memoryview | None) -> None:
        """Send a request. Raises ``OSError``, ``HTTPException``; if the other end does not know the token, before
        anything is sent to it."""
        if self.sock is None:  # not yet, or the other end has closed it
            self._meet()
        headers = {**headers, "Content-Length": str(len(body or b""))}
        self._asked += 1
        code = self._session.code("caller", self._asked, *replica_layout.signed(method, path, headers))
        self.request(method, path, body, {**headers, "Authorization": f"{replica_layout.SCHEME} {code}"})

    def _meet(self) -> None:
        own = new_nonce()
        self.request("GET", "/", headers={"X-Nonce": own})
        answer = self.getresponse()
        self._session, self._asked = Session(self._token, own, answer.read().decode("ascii", "replace")), 0
        if not self._session.fits(answer.headers.get("X-Code"), "listener"):
            raise ConnectionError("what answers there is not the cluster's node")


class _Connections:
    """Connections to the replica servers, one for each thread and node."""

    def __init__(self, places: ReplicaMap, silent_s: float) -> None:
        self._map = places
        self._silent_s = silent_s
        self._open = threading.local()

    @contextmanager
    def ask(
        self, node: str, method: str, what: str, headers: dict[str, str], body: memoryview | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, while it may be read. Raises ``OSError``, ``HTTPException``."""
        lines: dict[str, ReplicaConnection] = self._open.__dict__
        line = lines.get(node) or ReplicaConnection(self._map.places[node], self._map.token, self._silent_s)
        lines[node] = line
        whole = False
        try:
            line.ask(method, f"/{self._map.job}/{what}", headers, body)
            answer = line.getresponse()
            yield answer
            answer.read()
            whole = True
        finally:
            if not whole:  # what remains of it would be taken for the next answer
                line.close()
                lines.pop(node, None)


def _room(rooms: threading.local) -> memoryview:
    """This thread's memory for one block: small enough to stay in the processor's cache, and touched already."""
    room: bytearray | None = getattr(rooms, "data", None)
    if room is None:
        room = rooms.data = bytearray(BLOCK_BYTES)
    return memoryview(room)


def _fill(room: memoryview, readinto: Callable[[memoryview], int | None]) -> int:
    """How many bytes came: less than there is room only at the end."""
    done = 0
    while done < len(room) and (count := readinto(room[done:])):
        done += count
    return done
