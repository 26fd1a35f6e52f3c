"""A contender in a process of its own, as the bench sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError

from gpuctl.stacks.providers import processes
from tests.bench.checkpoint import s3fs_folder
from tests.bench.checkpoint.contenders import DCP, DCP_ASYNC
from tests.bench.checkpoint.storage import Place
from tests.waiting import TookTooLong

_ROOT = Path(__file__).resolve().parents[3]
_SCRIPT = Path(__file__).with_name("contestant.py")
_PATIENCE_S = 180.0


class Entrant:
    """See ``contestant.Contestant`` for what it can be asked."""

    def __init__(self, name: str, answers: Connection) -> None:
        self.name = name
        self._answers = answers

    def ask(self, what: str, *arguments: object) -> Any:
        """Raises ``RuntimeError`` with what went wrong there, and ``TookTooLong``."""
        self._answers.send((what, arguments))
        return self.answer()

    def answer(self) -> Any:
        if not self._answers.poll(_PATIENCE_S):
            raise TookTooLong(f"waited {_PATIENCE_S:g} s for {self.name}")
        try:
            found, error = self._answers.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: its process has ended") from None
        if error is not None:
            raise RuntimeError(f"{self.name}: {error}")
        return found


@contextmanager
def entrant(name: str, size: int, place: Place, root: Path) -> Iterator[Entrant]:
    """It ends with the context, and what it wrote is deleted. It owes a first answer, which says that it is there."""
    ours, theirs = Pipe()
    arguments = (theirs.fileno(), name, size, place.endpoint, place.bucket, place.prefix)
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env=environment(name, root),
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    try:
        yield Entrant(name, ours)
    finally:
        ours.close()
        process.kill()
        process.wait()
        with contextlib.suppress(BaseError):  # what went wrong with the server is told already
            place.clear()


def environment(name: str, root: Path) -> dict[str, str]:
    """Of a process that runs the contender ``name``."""
    path = [str(_ROOT)]
    if name in (DCP, DCP_ASYNC):
        path.insert(0, str(s3fs_folder.installed(_ROOT / "build")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", processes.MARK: str(root / "contestants")}
    return {**env, "PYTHONPATH": os.pathsep.join(path)}
