"""Pulumi's CLI as a process, with a script that stands in for it and goes on until the test lets it end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from pulumi.automation import CommandError, CommandResult, PulumiCommand
from semver import VersionInfo

from gpuctl.stacks.engine.pulumi_process import OwnSession
from tests.paths import ROOT
from tests.waiting import until

SCRIPT = """#!/bin/sh
trap 'echo told >> heard' INT
sleep 300 &
echo $! > child
echo "$*" >> ran
while [ ! -e go ]; do sleep 0.02; done
kill $!
echo done > done
"""
READER = """
import sys
from types import SimpleNamespace
from gpuctl.stacks.engine.pulumi_process import OwnSession

OwnSession(SimpleNamespace(command=sys.argv[1], version=None)).run(["up"], sys.argv[2], {})
"""


class Found(PulumiCommand):
    def __init__(self, program: Path) -> None:
        self.command = str(program)
        self.version = VersionInfo(3, 200, 0)


class Process:
    """The script, run by ``session``, and what it has come to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "pulumi"
        self.program.write_text(SCRIPT)
        self.program.chmod(0o755)
        self.session = OwnSession(Found(self.program))
        self._pool = ThreadPoolExecutor(1)

    def start(self) -> Future[CommandResult]:
        run = self._pool.submit(self.session.run, ["up"], str(self.folder), {})
        self.wait_until_begun()
        return run

    def wait_until_begun(self) -> None:
        until(self.ran, "the script's begin")

    def ran(self) -> list[str]:
        return self._lines("ran")

    def interrupt(self, heard: int) -> None:
        self.session.interrupt()
        until(lambda: len(self._lines("heard")) == heard, f"signal {heard}")

    def let_it_end(self) -> None:
        (self.folder / "go").touch()

    def close(self) -> None:
        self.let_it_end()
        self._pool.shutdown()

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.close()


def test_what_is_interrupted_between_two_runs_begins_no_other(process: Process) -> None:
    process.let_it_end()
    with process.session.one_verb():
        process.session.interrupt()
        with pytest.raises(CommandError, match="update cancelled"):
            process.session.run(["up"], str(process.folder), {})
    assert process.ran() == []
    process.session.run(["stack", "export"], str(process.folder), {})
    assert process.ran() == ["--non-interactive stack export"], "what comes after the verb does begin"


def test_two_interrupts_are_told_and_the_third_kills_all_of_it(process: Process) -> None:
    with process.session.one_verb():
        run = process.start()
        process.interrupt(1)
        process.interrupt(2)
        assert not run.done(), "it decides by itself when to end"
        process.session.interrupt()
        with pytest.raises(CommandError, match="code: -9"):
            run.result(60)
    child = int((process.folder / "child").read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, "its end")


def test_once_interrupted_it_ends_as_it_likes(process: Process) -> None:
    with process.session.one_verb():
        run = process.start()
        process.interrupt(1)
        process.let_it_end()
        assert run.result(60).code == 0


def test_it_goes_on_to_its_end_when_whoever_ran_it_is_killed(process: Process) -> None:
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", READER, process.program, process.folder], env=env) as reader:
        process.wait_until_begun()
        reader.send_signal(signal.SIGKILL)
    process.let_it_end()
    until((process.folder / "done").exists, "its end")
