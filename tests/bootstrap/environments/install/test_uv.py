"""uv as a program."""

from __future__ import annotations

import subprocess
import sys


def test_where_uv_is_does_not_depend_on_what_another_thread_reads_first() -> None:
    """Before any thread is there, all that ``sysconfig`` tells is known: see the module's first lines."""
    told = "import sysconfig, gpuctl.bootstrap.environments.install.uv; print('EXE' in (sysconfig._CONFIG_VARS or {}))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
