"""Bringing what the workers write on this node into the bucket: what they print, their metrics, their event files."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from gpuctl.bootstrap.run import Run
from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Store
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.streams import ChunkWriter
from gpuctl.cluster.worker import METRICS

_EVERY_S = 0.5
_EVENT_FILES_EVERY = 10
"""Turns between two looks at the event files."""
_READ_LIMIT = 1024 * 1024


class Shipper:
    """Ships one run's output on a thread of its own until ``finish``. What could not be sent waits a turn."""

    def __init__(self, store: Store, run: Run, clock: Clock) -> None:
        self._store = store
        self._run = run
        self._clock = clock
        where = (run.round.number, run.context.node)
        self._logs = _Outbox(ChunkWriter(store, layout.chunks(layout.logs(run.round.job), *where)))
        self._metrics = _Outbox(ChunkWriter(store, layout.chunks(layout.metrics(run.round.job), *where)))
        self._tails: dict[Path, _Tail] = {}
        self._event_files: dict[Path, float] = {}
        self._turn = 0
        self._shipping = threading.Lock()
        self._done = threading.Event()
        threading.Thread(target=self._work, name=f"shipper-{run.round.number}", daemon=True).start()

    def finish(self) -> None:
        """Send the rest. Raises nothing: logs are not worth a job."""
        self._done.set()
        self._ship(last=True)

    def _work(self) -> None:
        while not self._done.wait(_EVERY_S):
            self._ship(last=False)

    def _ship(self, *, last: bool) -> None:
        with self._shipping:
            self._logs.add(b"".join(self._new_log_lines(last)))
            metrics = self._run.context.round_dir / METRICS
            self._metrics.add(b"".join(line + b"\n" for line in self._tail(metrics).lines(last=False)))
            for outbox in (self._logs, self._metrics):
                outbox.send()
            self._turn += 1
            if last or self._turn % _EVENT_FILES_EVERY == 0:
                self._ship_event_files()

    def _new_log_lines(self, last: bool) -> list[bytes]:
        lines = []
        for path in sorted(self._run.log_dir.glob("*/attempt_0/*/std*.log")):
            local_rank = int(path.parent.name)
            for text in self._tail(path).lines(last=last):
                line = {
                    "t": self._clock.time(),
                    "rank": self._run.base_rank + local_rank,
                    "local_rank": local_rank,
                    "stream": path.stem,
                    "text": text.decode(errors="replace"),
                }
                lines.append(msgspec.json.encode(line) + b"\n")
        return lines

    def _tail(self, path: Path) -> _Tail:
        return self._tails.setdefault(path, _Tail(path))

    def _ship_event_files(self) -> None:
        run = self._run
        prefix = f"{layout.tensorboard(run.round.job)}/{run.round.number:06d}-{run.context.node}"
        for path in run.context.tensorboard_dir.rglob("*tfevents*"):
            try:
                changed = path.stat().st_mtime
                if self._event_files.get(path) != changed:
                    self._store.put(f"{prefix}/{path.relative_to(run.context.tensorboard_dir)}", path.read_bytes())
                    self._event_files[path] = changed
            except (OSError, GpuctlError):
                continue


class _Outbox:
    """Lines on their way: kept until the bucket has them."""

    def __init__(self, writer: ChunkWriter) -> None:
        self._writer = writer
        self._waiting = b""
        self._unsent = False

    def add(self, lines: bytes) -> None:
        self._waiting += lines

    def send(self) -> None:
        if not self._waiting and not self._unsent:
            return
        self._unsent = True
        lines, self._waiting = self._waiting, b""
        try:
            self._writer.append(lines)
        except GpuctlError:
            return  # the writer keeps them
        self._unsent = False


class _Tail:
    """Reads a growing file from where it last ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self, *, last: bool) -> list[bytes]:
        """Whole lines that are new; with ``last`` also a line without an end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(_READ_LIMIT if not last else -1)
        except OSError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines
