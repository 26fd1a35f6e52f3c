"""A person at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waiting import PATIENCE_S


def at_a_terminal(
    args: Sequence[str], folder: Path, env: Mapping[str, str], *, columns: int = 100, typed: str = ""
) -> tuple[int, str]:
    """The exit code of ``gpuctl args``, and what it shows on a terminal so wide, with whatever is ``typed`` once it
    asks. What terminal it is, ``env`` says (``TERM``)."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuctl.cli.main", *args],
        cwd=folder,
        env={**env, "COLUMNS": str(columns)},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    while select.select([leader], [], [], PATIENCE_S)[0]:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        shown += data
        if not data:
            break
        if typed and b"[y/N]" in shown:
            os.write(leader, typed.encode())
            typed = ""
    code = process.wait(timeout=PATIENCE_S)
    os.close(leader)
    return code, shown.decode().replace("\r\n", "\n")


def plain(shown: str) -> str:
    """Without colours and the like."""
    return re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", shown)
