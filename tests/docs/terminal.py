"""One line of a shell at a terminal of its own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.fakes.person import plain
from tests.waiting import PATIENCE_S, until


class Running:
    """A line of a shell at a terminal, whose questions are answered with yes."""

    def __init__(self, line: str, folder: Path, env: Mapping[str, str]) -> None:
        self.line = line
        self._said = b""
        self._leader, follower = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env=env,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        answered = 0
        while True:
            try:
                self._said += os.read(self._leader, 65536)
            except OSError:  # all who could write have closed it
                return
            while self._said.count(b"[y/N]") > answered:
                answered += 1
                os.write(self._leader, b"y\n")

    def output(self) -> str:
        return plain(self._said.decode(errors="replace").replace("\r", ""))

    def interrupt(self) -> None:
        until(lambda: self.output() or self._process.poll() is not None, f"{self.line} to say something")
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def finish(self, codes: Sequence[int]) -> str:
        """What it printed; it must end with one of ``codes``."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            pytest.fail(f"{self.line} does not end\n{self.output()}")
        self._reader.join(5)
        if not self._reader.is_alive():  # else its number would be another file's, and the thread would read that
            os.close(self._leader)
        printed = self.output()
        assert code in codes, f"{self.line} exited {code}\n{printed}"
        return printed
