"""``gpuctl up`` broken off at one resource, in each way that there is: for the tests that do so at every one of them.

Each way leaves something else behind: a refusal leaves a state that knows all; a first signal lets Pulumi finish what
it is doing; a second one ends it with what the cloud has just made; the death of gpuctl alone lets the engine write
down what has become of its last requests; the death of both leaves a lock, a pending operation and a plug-in that goes
on, and what it makes is in no state.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.user import User
from tests.waiting import PATIENCE_S

_MAY_NOT_LOOK = re.compile(r"error: bucket \S+ was not deleted, .*; if nobody uses it: gpuctl (buckets rm .*)")
"""On Azure a user gets the right to read the bucket after it is made."""


def refused(user: User, operation: str) -> None:
    """By the cloud."""
    user.obstacles.refuse(operation)
    done = user.up(code=1)
    assert "remaining:" in done.stderr or "nothing remains" in done.stderr, "what it costs is not told"
    _assert_names_the_way_out(user, done.stderr)


def terminated(user: User, operation: str, number: signal.Signals = signal.SIGTERM) -> None:
    """As a cancelled CI run does; with SIGHUP, as a closed terminal does."""
    user.obstacles.hold(operation)
    with _up(user) as process:
        _wait_until_held(user, process, operation)
        process.send_signal(number)
        _wait_until_cancelled(user, process, operation)
        user.obstacles.release(operation)
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 128 + number, said
    assert "interrupted: waiting for Pulumi to finish" in said
    _assert_names_the_way_out(user, said)


def interrupted(user: User, operation: str) -> None:
    """By Ctrl-C."""
    terminated(user, operation, signal.SIGINT)


def hung_up(user: User, operation: str) -> None:
    """The terminal was closed."""
    terminated(user, operation, signal.SIGHUP)


def interrupted_twice(user: User, operation: str) -> None:
    """By Ctrl-C, and again: the engine ends at once, and never hears of what the cloud has made."""
    user.obstacles.hold(operation, once_made=True)
    with _up(user) as process:
        _wait_until_held(user, process, operation)
        process.send_signal(signal.SIGINT)
        _wait_until_cancelled(user, process, operation)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE_S)[1]
    user.obstacles.release(operation)
    assert process.returncode == 128 + signal.SIGINT, said
    _assert_names_the_way_out(user, said)


def left_alone(user: User, operation: str) -> None:
    """gpuctl is killed; the engine goes on to its end."""
    user.obstacles.hold(operation)
    with _up(user) as process:
        _wait_until_held(user, process, operation)
        engine = _engine(user)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    user.obstacles.release(operation)
    user.obstacles.wait_until_ended(operation)
    engine.wait(PATIENCE_S)


def killed(user: User, operation: str) -> None:
    """gpuctl and the engine are killed, and the plug-in makes it all the same."""
    user.obstacles.hold(operation)
    with _up(user) as process:
        _wait_until_held(user, process, operation)
        engine = _engine(user)
        engine.kill()
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    user.obstacles.release(operation)
    user.obstacles.wait_until_ended(operation)


Way = Callable[[User, str], None]
WAYS: tuple[Way, ...] = (
    refused,
    killed,
    terminated,
    left_alone,
    interrupted,
    interrupted_twice,
    hung_up,
)
A_FEW = (refused, terminated)
"""For the gate."""


def every_way(cloud: str) -> list[Any]:
    """Parameters ``way`` and ``goes_on``: one way for each resource in turn; and all ways for all of them, each once
    with ``down`` after it, and once with ``up`` first. Each may run beside the others."""
    in_turn = pytest.param(None, False, id="in turn", marks=pytest.mark.xdist_group(f"any resource {cloud}"))
    return [in_turn] + [
        pytest.param(
            way,
            goes_on,
            id=f"{way.__name__}, {'up, down' if goes_on else 'down'}",
            marks=[
                pytest.mark.exhaustive,
                pytest.mark.xdist_group(f"any resource {cloud} {way.__name__} {goes_on}"),
            ],
        )
        for way in WAYS
        for goes_on in (False, True)
    ]


def creations(user: User) -> list[str]:
    """Of a quiet ``up``, in their order; all of it is taken away again."""
    user.up()
    found = user.obstacles.done()
    _down(user)
    return found


def at_every_resource(user: User, way: Way | None, *, goes_on: bool) -> None:
    """See ``at_one``; without a ``way``, another one at each resource, and ``goes_on`` at every other one."""
    operations = sorted(creations(user))  # the engine makes several at once, in no certain order
    assert len(operations) > 10
    for number, operation in enumerate(operations):
        goes_on = goes_on if way else number % 2 == 1
        at_one(user, way or WAYS[number % len(WAYS)], operation, goes_on=goes_on)


def at_one(user: User, way: Way, operation: str, *, goes_on: bool = False) -> None:
    """``up`` breaks off; then, if it ``goes_on``, another one comes to its end; after ``down``, ``leaks`` finds
    nothing."""
    user.obstacles.forget()
    way(user, operation)
    user.obstacles.forget()
    try:
        if goes_on:
            user.up()
            assert len(user.machines()) == 2
        _down(user)
    except AssertionError as error:
        raise AssertionError(f"{way.__name__} at {operation!r}: {error}") from error


def _down(user: User) -> None:
    """Without ``--force``, and with the bucket: the next ``up`` makes that anew."""
    command = ("down", "-y", "--delete-checkpoints", user.cluster, "--cluster", user.cluster)
    done = user.run_alone(*command, code=None)
    if unseen := _MAY_NOT_LOOK.search(done.stderr):
        assert user.up_flags[1] == "azure", "elsewhere whoever makes a bucket may read it"
        user.run_alone(*unseen[1].split())
    else:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    left = user.run("leaks", "--provider", user.up_flags[1])
    assert left.stdout == "", left.stdout


def _assert_names_the_way_out(user: User, said: str) -> None:
    """As it must be typed: without the cluster's name it would take down another one."""
    assert f"`gpuctl down --cluster {user.cluster}`" in said.splitlines()[-1], said


def _up(user: User) -> subprocess.Popen[str]:
    return started(user, "up", *user.up_flags, "--nodes", "2", "-y", "--no-verify")


def started(user: User, *args: str) -> subprocess.Popen[str]:
    """gpuctl, with pipes for what it prints."""
    command = [sys.executable, "-m", "gpuctl.cli.main", *args, "--cluster", user.cluster]
    piped = subprocess.PIPE
    return subprocess.Popen(command, env=user.env, cwd=user.folder, stdout=piped, stderr=piped, text=True)


def _wait_until_held(user: User, process: subprocess.Popen[str], operation: str) -> None:
    try:
        user.obstacles.wait_until_held(operation)
    except TimeoutError as error:
        process.kill()
        raise AssertionError(f"{operation} was never begun: {process.communicate()[1]}") from error


def _wait_until_cancelled(user: User, process: subprocess.Popen[str], operation: str) -> None:
    try:
        user.obstacles.wait_until_cancelled()
    except TimeoutError as error:
        there = "has ended" if process.poll() is not None else "goes on"
        process.kill()
        said = process.communicate()[1]
        raise AssertionError(f"gpuctl {there}, and nobody cancelled anything at {operation}: {said}") from error


def _engine(user: User) -> psutil.Process:
    """Who holds the stack's lock."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for lock in _locks(user):
            with suppress(OSError, ValueError, psutil.NoSuchProcess):
                return psutil.Process(int(json.loads(lock.read_text())["pid"]))
    raise TimeoutError("nobody holds the lock")


def _locks(user: User) -> list[Path]:
    return sorted((user.last_up_path().parent / "state" / ".pulumi" / "locks").rglob("*.json"))
