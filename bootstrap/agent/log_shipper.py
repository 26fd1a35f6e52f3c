"""Bringing what the workers write on this node into the bucket: what they print, their metrics, their event files.

A line that is not at its end yet, such as a progress bar that redraws itself, is sent as it looks every few seconds,
with ``"partial": true``: the next line of that rank takes its place.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec

from gpuctl.bootstrap.agent.round_run import RoundRun
from gpuctl.bootstrap.jobs.old_jobs import UNSENT
from gpuctl.bootstrap.launch.last_words import FaultTrimmer, shown
from gpuctl.cluster import layout
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.interface import Store
from gpuctl.cluster.storage.streams import ChunkWriter
from gpuctl.cluster.worker_context import METRICS, STDERR_MARK

_EVERY_S = 0.5
_EVENT_FILES_EVERY = 10
"""Turns between two looks at the event files."""
_READ_LIMIT = 1024 * 1024
_PARTIAL_EVERY_S = 3.0


class LogShipper:
    """Ships one run's output on a thread of its own until ``finish``. What could not be sent waits a turn."""

    def __init__(self, store: Store, run: RoundRun, clock: Clock) -> None:
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
        with contextlib.suppress(OSError):
            run.context.round_dir.mkdir(parents=True, exist_ok=True)
            (run.context.round_dir / UNSENT).touch()
        threading.Thread(target=self._work, name=f"shipper-{run.round.number}", daemon=True).start()

    def finish(self) -> None:
        """Send the rest. Raises nothing: logs are not worth a job."""
        self._done.set()
        if self._ship(last=True):
            with contextlib.suppress(OSError):
                (self._run.context.round_dir / UNSENT).unlink(missing_ok=True)

    def _work(self) -> None:
        while not self._done.wait(_EVERY_S):
            self._ship(last=False)

    def _ship(self, *, last: bool) -> bool:
        """Whether all that there is has been sent."""
        with self._shipping:
            self._logs.add(b"".join(self._new_log_lines(last)))
            metrics = self._run.context.round_dir / METRICS
            self._metrics.add(b"".join(line + b"\n" for line in self._tail(metrics).lines(last=False)))
            sent = [outbox.send() for outbox in (self._logs, self._metrics)]
            self._turn += 1
            if last or self._turn % _EVENT_FILES_EVERY == 0:
                sent.append(self._ship_event_files())
            return all(sent)

    def _new_log_lines(self, last: bool) -> list[bytes]:
        now = self._clock.time()
        lines = []
        # Where a worker has two files after all, what it printed comes before the error that it led to.
        for path in sorted(self._run.log_dir.glob("*/attempt_0/*/std*.log"), key=_stdout_first):
            local_rank = int(path.parent.name)
            tail = self._tail(path)
            found: list[tuple[bytes, dict[str, bool]]] = [(line, {}) for line in tail.lines(last=last)]
            if bar := tail.partial(now):
                found.append((bar, {"partial": True}))
            for text, more in found:
                line = {
                    "t": now,
                    "rank": self._run.base_rank + local_rank,
                    "local_rank": local_rank,
                    "stream": "stderr" if STDERR_MARK in text else path.stem,
                    "text": shown(text).decode(errors="replace"),
                    **more,
                }
                lines.append(msgspec.json.encode(line) + b"\n")
        return lines

    def _tail(self, path: Path) -> _Tail:
        return self._tails.setdefault(path, _Tail(path))

    def _ship_event_files(self) -> bool:
        run, sent = self._run, True
        prefix = f"{layout.tensorboard(run.round.job)}/{run.round.number:06d}-{run.context.node}"
        for path in run.context.tensorboard_dir.rglob("*tfevents*"):
            try:
                changed = path.stat().st_mtime
                if self._event_files.get(path) != changed:
                    self._store.put(f"{prefix}/{path.relative_to(run.context.tensorboard_dir)}", path.read_bytes())
                    self._event_files[path] = changed
            except (OSError, GpuctlError):
                sent = False
        return sent


class _Outbox:
    """Lines that wait to be sent: kept until the bucket has them."""

    def __init__(self, writer: ChunkWriter) -> None:
        self._writer = writer
        self._waiting = b""
        self._unsent = False

    def add(self, lines: bytes) -> None:
        self._waiting += lines

    def send(self) -> bool:
        """Send what waits; returns whether nothing is left."""
        if not self._waiting and not self._unsent:
            return True
        self._unsent = True
        lines, self._waiting = self._waiting, b""
        try:
            self._writer.append(lines)
        except GpuctlError:
            return False  # the writer keeps them
        self._unsent = False
        return True


class _Tail:
    """Reads a growing file from where it last ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""
        self._trimmer = FaultTrimmer()
        self._anew = True
        """Since the last call of ``partial`` another line has begun."""
        self._partial = b""
        self._partial_at = 0.0

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
        self._anew = self._anew or bool(lines)
        self._rest = _last_state(self._rest)
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return self._trimmer.feed(lines, last=last)

    def partial(self, now: float) -> bytes:
        """The line that is not at its end yet, if it began a while ago, and looks other than a while ago."""
        if self._anew or not self._rest:
            self._partial, self._partial_at, self._anew = b"", now, False
        if shown(self._rest) in (self._partial, b"") or now - self._partial_at < _PARTIAL_EVERY_S:
            return b""
        self._partial, self._partial_at = shown(self._rest), now
        return self._rest


def _stdout_first(path: Path) -> tuple[int, bool]:
    return int(path.parent.name), path.stem != "stdout"


def _last_state(rest: bytes) -> bytes:
    """The last visible state of a progress bar that redrew itself, and what follows should that be a new state."""
    states = rest.split(b"\r")
    whole = [state for state in states[:-1] if state]
    return b"\r".join([*whole[-1:], states[-1]]) if len(states) > 1 else rest
