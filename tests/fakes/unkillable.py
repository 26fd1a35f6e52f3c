"""A process that outlives being killed, as one does that hangs in a driver: whoever waits for it waits on.

It is traced by a process that takes no notice of its end; until then its parent is not told of it either.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

_TRACER = """
import ctypes, os, sys
trace = ctypes.CDLL(None, use_errno=True).ptrace
trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE = 0x4206
failed = trace(PTRACE_SEIZE, int(sys.argv[1]), None, None)
print(os.strerror(ctypes.get_errno()) if failed else "held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Within this, the end of process ``pid`` remains unseen."""
    command = [sys.executable, "-c", _TRACER, str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdin and tracer.stdout
        try:
            if (said := tracer.stdout.readline().strip()) != "held":
                pytest.skip(f"needs the right to trace a process: {said}")
            yield
        finally:
            tracer.stdin.close()
            tracer.wait(20)
