"""Steps: tried again, limited, marked, and safe to be broken off anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.boot.steps import Failed, Step, run, sh
from tests.fakes.bare_machine import lose_power
from tests.fakes.unkillable import held
from tests.paths import ROOT
from tests.waiting import until


class Ran:
    """``run`` below ``root``, and what it told and how long it would have slept."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.told: list[tuple[str, str]] = []
        self.slept: list[float] = []

    def run(self, *steps: Step) -> None:
        run(steps, self.root, lambda step, reason: self.told.append((step, reason)), self.slept.append)

    def log(self) -> str:
        return (self.root / "var/log/gpuctl-boot.log").read_text()

    def marks(self) -> dict[str, str]:
        return {p.stem: p.read_text() for p in (self.root / "var/lib/gpuctl/boot").glob("*.done")}


@pytest.fixture
def ran(tmp_path: Path) -> Ran:
    return Ran(tmp_path)


def counting(path: Path, then: Callable[[int], None] = lambda _: None) -> Callable[[], None]:
    """A step that notes each try, and calls ``then`` with their number: steps run in processes of their own."""

    def do() -> None:
        with path.open("a") as file:
            file.write("x")
        then(path.stat().st_size)

    return do


def fail_until(number: int) -> Callable[[int], None]:
    def then(tries: int) -> None:
        if tries < number:
            raise OSError(f"no luck, {tries}")

    return then


def test_steps_run_in_order_and_are_marked(ran: Ran, tmp_path: Path) -> None:
    order = tmp_path / "order"

    def note(text: str) -> Callable[[], None]:
        return lambda: print(text, end="", file=order.open("a"))

    ran.run(Step("one", note("1")), Step("two", note("2")))
    assert order.read_text() == "12"
    assert ran.marks() == {"one": "done", "two": "done"}
    assert ran.told == [("one", ""), ("two", "")]


def test_a_step_that_is_done_is_not_done_again_unless_it_must_be(ran: Ran, tmp_path: Path) -> None:
    steps = (
        Step("once", counting(tmp_path / "once")),
        Step("always", counting(tmp_path / "always"), always=True),
        Step("first", counting(tmp_path / "versioned"), mark="1"),
    )
    ran.run(*steps)
    ran.run(*steps)
    ran.run(Step("first", counting(tmp_path / "versioned"), mark="2"))
    assert [(tmp_path / name).read_text() for name in ("once", "always", "versioned")] == ["x", "xx", "xx"]
    assert ran.marks()["first"] == "2"


def test_a_step_that_fails_twice_then_works_is_tried_three_times_with_longer_and_longer_pauses(
    ran: Ran, tmp_path: Path
) -> None:
    ran.run(Step("fetch", counting(tmp_path / "tries", fail_until(3)), pause_s=2))
    assert (tmp_path / "tries").read_text() == "xxx"
    assert ran.slept == [2, 4]
    assert ran.told == [("fetch", ""), ("fetch", "no luck, 1"), ("fetch", "no luck, 2")]
    assert ran.marks() == {"fetch": "done"}
    assert "OSError: no luck, 2" in ran.log()


def test_pauses_do_not_grow_beyond_a_minute(ran: Ran, tmp_path: Path) -> None:
    ran.run(Step("fetch", counting(tmp_path / "tries", fail_until(9)), tries=9))
    assert ran.slept == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_step_that_goes_on_failing_ends_it_all_with_its_reason_and_no_mark(ran: Ran, tmp_path: Path) -> None:
    with pytest.raises(Failed) as caught:
        ran.run(Step("a", counting(tmp_path / "a")), Step("b", counting(tmp_path / "b", fail_until(99)), tries=2))
    assert (caught.value.step, caught.value.reason) == ("b", "no luck, 2")
    assert ran.marks() == {"a": "done"}
    ran.run(Step("a", counting(tmp_path / "a")), Step("b", counting(tmp_path / "b")))
    assert (tmp_path / "a").read_text() == "x"


@pytest.mark.timing
def test_a_step_over_its_limit_is_killed_with_all_that_it_started(ran: Ran, tmp_path: Path) -> None:
    pids, late = tmp_path / "pids", tmp_path / "late"

    def hang() -> None:
        sh("sh", "-c", f"sleep 600 & echo $! $$ $PPID > {pids}; sleep 4; touch {late}; wait")

    with pytest.raises(Failed, match=r"took longer than 0.5 s"):
        ran.run(Step("hang", hang, limit_s=0.5, tries=1))
    assert not late.exists()
    for pid in map(int, pids.read_text().split()):
        until(partial(_is_gone, pid), f"the end of {pid}")
    assert "took longer than 0.5 s" in ran.log()


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_a_step_leaves_behind_ends_with_it_although_it_succeeded(ran: Ran, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    ran.run(Step("daemon", lambda: print(sh("sh", "-c", f"sleep 600 > /dev/null 2>&1 & echo $! > {pid}"))))
    until(lambda: _is_gone(int(pid.read_text())), "the end of what was left")


def test_a_step_that_dies_without_a_word_fails(ran: Ran) -> None:
    with pytest.raises(Failed, match="ended with -9"):
        ran.run(Step("shot", lambda: os.kill(os.getpid(), signal.SIGKILL), tries=1))
    with pytest.raises(Failed, match="SystemExit"):
        ran.run(Step("left", lambda: sys.exit(), tries=1))


def test_the_log_has_what_programs_print_and_the_reason_is_their_last_line(ran: Ran) -> None:
    def broken() -> None:
        sh("sh", "-c", "echo one; echo two >&2; echo; exit 7")

    with pytest.raises(Failed, match=r"^broken: sh -c .* exited with 7: two$"):
        ran.run(Step("broken", broken, tries=1))
    assert "\none\ntwo\n" in ran.log()


_HANGS = """
import sys
from pathlib import Path
from gpuctl.bootstrap.boot.steps import Step, run, sh

root = Path(sys.argv[1])
hang = Step("hang", lambda: sh("sh", "-c", 'echo $$ > "$0"; exec sleep 600', str(root / "pid")), limit_s=2, tries=1)
run([hang], root, lambda *_: None)
"""


@pytest.mark.timing
def test_a_program_that_cannot_be_killed_holds_no_step_beyond_its_limit(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", _HANGS, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: pid.exists() and pid.read_text(), "the program")
    with held(int(pid.read_text())):
        try:
            _, said = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            lose_power(process)
            raise
    assert said.endswith("Failed: hang: took longer than 2 s\n")


_PROGRAM = """
import sys
from pathlib import Path
from gpuctl.bootstrap.boot.steps import Step, run, sh

root = Path(sys.argv[1])

def slow():
    with (root / "tries").open("a") as file:
        file.write("x")
    sh("sh", "-c", 'while [ -e "$0" ]; do sleep 0.02; done', str(root / "wait"))
    with (root / "done").open("a") as file:
        file.write("x")

run([Step("slow", slow, limit_s=60)], root, lambda *_: None)
"""


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, str(root)], cwd=ROOT, text=True)


@pytest.mark.slow
def test_a_step_that_lost_power_is_run_again_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    process = start(tmp_path)
    until(lambda: (tmp_path / "tries").exists(), "the step")
    lose_power(process)
    assert not (tmp_path / "var/lib/gpuctl/boot/slow.done").exists()
    (tmp_path / "wait").unlink()
    assert start(tmp_path).wait(timeout=60) == 0
    assert ((tmp_path / "tries").read_text(), (tmp_path / "done").read_text()) == ("xx", "x")
    assert start(tmp_path).wait(timeout=60) == 0
    assert (tmp_path / "tries").read_text() == "xx"


def test_a_second_program_waits_for_a_step_that_a_killed_one_has_left_behind(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    first = start(tmp_path)
    until(lambda: (tmp_path / "tries").exists(), "the step")
    first.kill()
    first.wait(timeout=60)
    second = start(tmp_path)
    lock = tmp_path / "var/lib/gpuctl/boot/lock"
    until(lambda: _waits_for(second.pid, lock), "the second program at the lock")
    assert (tmp_path / "tries").read_text() == "x"
    (tmp_path / "wait").unlink()
    assert second.wait(timeout=60) == 0
    assert ((tmp_path / "tries").read_text(), (tmp_path / "done").read_text()) == ("xx", "xx")


def _waits_for(pid: int, lock: Path) -> bool:
    """By the function of the kernel that it sleeps in, or its list of locks: ``1: -> FLOCK ADVISORY WRITE <pid> …``, in
    which a container does not see those whose first owner has ended."""
    lines = Path("/proc/locks").read_text().splitlines()
    listed = any("->" in line and f" {pid} " in line for line in lines)
    return lock.exists() and (listed or "lock_inode_wait" in Path(f"/proc/{pid}/wchan").read_text())
