"""Steps towards a node: each is tried a few times, has a time limit, and is marked when done.

A step runs in a process group of its own, which ends with it however that ends. It may be broken off anywhere, by its
limit or a power loss, and is then run again from its beginning: whatever it does allows that.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_LOG = "var/log/gpuctl-boot.log"
_MOST_PAUSE_S = 60.0
_REASON_BYTES = 2000


@dataclass(frozen=True)
class Step:
    name: str
    do: Callable[[], None]
    limit_s: float = 600.0
    """Of one try; then its processes are killed."""
    tries: int = 5
    pause_s: float = 2.0
    """Before the second try; each further one is twice as long."""
    mark: str = "done"
    """What the marker says: with another one, such as that of another version, the step is done again."""
    always: bool = False
    """At every boot, because it does not outlive one, or may have become wrong."""


class Failed(Exception):
    """A step that failed for good."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{step}: {reason}")
        self.step = step
        self.reason = reason


def run(
    steps: Sequence[Step],
    root: Path,
    tell: Callable[[str, str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """All that are not done yet, in order. ``tell`` is given each step that begins, with nothing or with the reason why
    its last try failed.

    Only one process at a time does this below one ``root``: a second one waits, also for a step that an earlier one has
    left behind when it was killed. Raises ``Failed``.
    """
    markers = root / "var/lib/gpuctl/boot"
    for folder in (markers, root / "var/log"):
        folder.mkdir(parents=True, exist_ok=True)
    with (markers / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in steps:
            marker = markers / f"{step.name}.done"
            if not step.always and marker.exists() and marker.read_text() == step.mark:
                continue
            _persist(step, root, tell, sleep)
            _write(marker, step.mark)


def sh(*command: str, env: dict[str, str] | None = None) -> str:
    """Run a program, which prints into the log, and return what it printed. Raises ``OSError`` with its last line."""
    print("+", *command, flush=True)
    lines = [""]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        raise OSError(f"{' '.join(command)} exited with {process.returncode}: {last}")
    return "".join(lines)


def works(*command: str, env: dict[str, str] | None = None) -> bool:
    """``sh``, where a failure is an answer."""
    with suppress(OSError):
        sh(*command, env=env)
        return True
    return False


def note(root: Path, line: str) -> None:
    """A line of ours in the log."""
    with (root / _LOG).open("a") as log:
        print(time.strftime("%H:%M:%S"), line, file=log)


def _persist(step: Step, root: Path, tell: Callable[[str, str], None], sleep: Callable[[float], None]) -> None:
    reason = ""
    for number in range(step.tries):
        if number:
            sleep(min(step.pause_s * 2 ** (number - 1), _MOST_PAUSE_S))
        tell(step.name, reason)
        reason = _attempt(step, root)
        if not reason:
            return
    raise Failed(step.name, reason)


def _attempt(step: Step, root: Path) -> str:
    """The reason why it failed, or nothing."""
    began = time.monotonic()
    ours, theirs = os.pipe()
    note(root, step.name)
    with (root / _LOG).open("a") as log:
        child = os.fork()
        if not child:
            _become(step, log.fileno(), theirs)
        os.close(theirs)
        with suppress(OSError):
            os.setpgid(child, child)  # as the child does: whoever comes first
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.set_blocking(ours, False)
        said = b""
        with suppress(BlockingIOError):
            said = os.read(ours, _REASON_BYTES)
        os.close(ours)
        code = os.waitstatus_to_exitcode(status)
        reason = "" if code == 0 else said.decode(errors="replace") or f"ended with {code}"
        if code == -signal.SIGALRM:
            reason = f"took longer than {step.limit_s:g} s"
    note(root, f"{step.name} {reason or 'done'} ({time.monotonic() - began:.1f} s)")
    return reason


def _become(step: Step, log: int, told: int) -> NoReturn:
    """The child: never returns. Its own alarm is its limit, so that it holds even if the parent is killed."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, step.limit_s)
        step.do()
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the reason
        words = " ".join(str(error).split()) or repr(error)
        print(f"{type(error).__name__}: {words}", flush=True)
        os.write(told, words.encode()[:_REASON_BYTES])
    finally:
        os._exit(code)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, whenever the power goes."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
