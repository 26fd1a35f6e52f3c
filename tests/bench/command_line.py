"""Seconds until the command line has answered, bytecode cached."""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import gpuctl
from tests.bench.ours import local_cluster
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row

_GPUCTL = str(Path(sys.executable).with_name("gpuctl"))


def show_help(settings: Settings) -> Row:
    seconds = _seconds([_GPUCTL, "--help"], settings)
    quoted = "sky 1.98, dstack 1.24, torchx 0.12 (quoted, not measured)"
    return _row("cli_help", seconds, quoted, bar=0.20)


def status(settings: Settings) -> Row:
    """Of a live cluster with two nodes and nothing to do."""
    with local_cluster(settings.root, (2, 2)):
        seconds = _seconds([_GPUCTL, "status", "-o", "json", "--cluster", "bench"], settings)
    return _row("cli_status", seconds, "sky 3.77 (quoted, not measured)", bar=0.35)


def _seconds(command: Sequence[str], settings: Settings) -> list[float]:
    compileall.compile_dir(Path(gpuctl.__file__).parent, quiet=2)
    found: list[float] = []
    for _ in range(4 * settings.runs + 1):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        found.append(time.perf_counter() - began)
    return found[1:]


def _row(name: str, seconds: list[float], reference: str, bar: float) -> Row:
    note = f"{spread(seconds)} in {len(seconds)} runs"
    return Row(name, median(seconds), reference, "s", f"<= {bar:.2f} s", median(seconds) <= bar, note)
