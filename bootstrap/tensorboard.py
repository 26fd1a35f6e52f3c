"""TensorBoard over a job's event files, on a node: ``python -m gpuctl.bootstrap.tensorboard NODE_FOLDER JOB``.

Event files of all nodes and rounds come from the bucket, again and again; those that this node writes right now are
taken from its disk. Prints ``port N`` once it answers there, on localhost only, and ends when its standard input does:
that is the connection of whoever looks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

_EVERY_S = 5.0
_PATIENCE_S = 60.0
_LOCALHOST = "127.0.0.1"


class EventFiles:
    """A job's event files below ``target``, one folder a round and node, kept current by ``refresh``."""

    def __init__(self, store: Bucket, job: str, node: str, rounds: Path, target: Path) -> None:
        self._store = store
        self._prefix = layout.tensorboard(job)
        self._node = node
        self._rounds = rounds
        """This node's folders of the job's rounds."""
        self._target = target
        self._seen: dict[str, str] = {}

    def refresh(self) -> None:
        """Fetch what is new. Raises ``StoreUnavailable`` and ``StoreError``."""
        own = self._link_own()
        for entry in self._store.list(self._prefix):
            name = entry.key.removeprefix(f"{self._prefix}/")
            if self._seen.get(name) == entry.tag or name.partition("/")[0] in own or ".." in Path(name).parts:
                continue
            data = self._store.get(entry.key)
            if data is not None:
                path = self._target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)  # the same file: TensorBoard goes on reading where it was
                self._seen[name] = entry.tag

    def _link_own(self) -> set[str]:
        """Rounds that this node has on its disk, as they are written. Returns their names."""
        found = set()
        for folder in self._rounds.glob("*/tensorboard"):
            if any(folder.rglob("*tfevents*")):
                name = f"{folder.parent.name}-{self._node}"
                found.add(name)
                with contextlib.suppress(FileExistsError):
                    self._target.mkdir(exist_ok=True)
                    (self._target / name).symlink_to(folder)
        return found


def serve(store: Bucket, node: str, folder: Path, job: str) -> int:
    """Until standard input ends, SIGTERM comes, or TensorBoard ends; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="gpuctl-tensorboard-") as place:
        files = EventFiles(store, job, node, folder / "jobs" / job / "rounds", Path(place) / "events")
        files.refresh()
        over = threading.Event()
        threading.Thread(target=watch_stdin, args=(over,), daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: over.set())
        port = free_port()
        with (Path(place) / "log").open("w+b") as log, _started(Path(place) / "events", port, log) as process:
            if not wait_until_it_answers(process, port, over):
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace"))
                return process.poll() or 1
            print(f"port {port}", flush=True)
            while not over.wait(_EVERY_S) and process.poll() is None:
                with contextlib.suppress(GpuctlError, OSError):  # the next time, then
                    files.refresh()
            return process.poll() or 0


@contextlib.contextmanager
def _started(events: Path, port: int, log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """TensorBoard, which has much to say about itself, and nothing that whoever looks wants to read."""
    events.mkdir(exist_ok=True)
    words = ("--logdir", str(events), "--host", _LOCALHOST, "--port", str(port), "--reload_interval", f"{_EVERY_S:.0f}")
    command = (sys.executable, "-m", "tensorboard.main", *words)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def watch_stdin(over: threading.Event) -> None:
    """Set ``over`` once standard input ends."""
    while os.read(0, 4096):
        pass
    over.set()


def wait_until_it_answers(process: subprocess.Popen[bytes], port: int, over: threading.Event) -> bool:
    """Whether the server that ``process`` is answers at ``port``, before it ends, or a minute has passed."""
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None and not over.is_set() and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((_LOCALHOST, port)) == 0:
                return True
        time.sleep(0.05)
    return False


def free_port() -> int:
    """A port that is free now. Servers themselves can take any, but say it in a sentence that changes."""
    with socket.socket() as probe:
        probe.bind((_LOCALHOST, 0))
        chosen: int = probe.getsockname()[1]
        return chosen


def main(folder: str, job: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it, and ends standard input
    path = Path(folder)
    identity = NodeIdentity.read(path)
    os.environ.update(identity.env)  # the keys to the bucket, where the machine has no identity of its own
    try:
        return serve(open_bucket(identity.bucket), identity.node, path, job)
    except GpuctlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
