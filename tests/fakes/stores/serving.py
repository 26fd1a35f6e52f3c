"""A server in a process of its own, which ends with its parent however that ends: its standard input is closed then."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from urllib.parse import urlsplit

from tests.paths import ROOT
from tests.waiting import PATIENCE_S


@contextmanager
def started(command: Sequence[str], ready: str) -> Iterator[str]:
    """Run ``command`` and yield group 1 of the first line that it prints and ``ready`` matches: where it listens.

    The command reads its standard input and ends when that does.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        too_late = threading.Timer(PATIENCE_S, server.kill)
        too_late.start()
        try:
            lines = (re.search(ready, line) for line in server.stdout)
            found = next((line for line in lines if line), None)
            too_late.cancel()
            assert found, f"{command[0]} ended with {server.wait()} before it listened, or took {PATIENCE_S:.0f} s"
            yield found[1]
        finally:
            too_late.cancel()
            server.kill()


class Restarted:
    """A server that is killed and is back at the same port at once. ``serve`` starts it at a port."""

    def __init__(self, serve: Callable[[int], AbstractContextManager[str]]) -> None:
        self._serve = serve
        self._life = ExitStack()
        self.endpoint = self._life.enter_context(serve(0))

    def __enter__(self) -> Restarted:
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()

    def restart(self) -> None:
        """Kill -9, and begin anew."""
        self._life.close()
        self._life.enter_context(self._serve(urlsplit(self.endpoint).port or 0))
