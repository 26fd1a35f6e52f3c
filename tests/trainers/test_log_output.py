"""What a worker prints to a log whose disk is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.trainers.launchers.torchrun import WORKER_SITE
from tests.fakes.small_disk import fill, mounted

SCRIPT = """
import os, sys
print("begun", flush=True)
input()
for number in range(1000):
    print("a line with some words in it")
print("more", file=sys.stderr, flush=True)
print("more", flush=True)
os.write(int(sys.argv[1]), b"printed")
input()
print("done")
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where a descriptor leads to")


class Printing:
    """An interpreter that a worker starts, and that prints to ``log``."""

    def __init__(self, log: Path, *options: str) -> None:
        log.parent.mkdir(parents=True)
        self._told, told = os.pipe()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-c", SCRIPT, str(told)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": WORKER_SITE},
                bufsize=0,
                pass_fds=[told],
            )
        os.close(told)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    def heard(self) -> bytes:
        """What it tells, or nothing if it ends before."""
        with os.fdopen(self._told, "rb", buffering=0) as pipe:
            return pipe.read(100)

    def code(self) -> int:
        return self._process.wait()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "1m") as folder:
        yield folder


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "-u"])
def test_output_is_dropped_while_the_disk_of_the_log_is_full_and_the_log_says_how_much(
    small: Path, options: tuple[str, ...]
) -> None:
    log = small / "attempt_0" / "0" / "stdout.log"
    printing = Printing(log, *options)
    ballast = fill(small)
    printing.go_on()
    assert printing.heard() == b"printed"
    ballast.unlink()
    printing.go_on()
    assert printing.code() == 0
    *_, missing, last = log.read_text().splitlines()
    assert last == "done"
    assert missing.startswith("gpuctl: ") and missing.endswith(" bytes of output are missing here: the disk was full")


def test_a_program_that_writes_to_another_file_is_told_of_the_full_disk(small: Path) -> None:
    printing = Printing(small / "out" / "results.csv")
    fill(small)
    printing.go_on()
    assert printing.heard() == b"" and printing.code() != 0
