"""Why a worker was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.launch.memory import MemoryWatch
from tests.waiting import until

LIMIT = 64 * 1024 * 1024
FILLS = """
import sys
open(sys.argv[1], "w").write("0")
print(flush=True)
sys.stdin.readline()
block = bytearray(int(sys.argv[2]) // 2)
print(flush=True)
sys.stdin.readline()
block = [bytearray(2 * int(sys.argv[2])) for _ in range(4)]
for part in block:
    part[::4096] = b"x" * len(part[::4096])
"""


@pytest.fixture
def small() -> Iterator[Path]:
    """The file that a process writes to in order to be in a cgroup with little memory."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = top / f"gpuctl-test-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(LIMIT))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        yield folder / "cgroup.procs"
        folder.rmdir()
        return
    pytest.skip("needs the right to make a cgroup with a limit of memory")


def _may_read_kernel_log() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_a_worker_that_the_oom_killer_ends_is_told_as_such_with_the_memory_that_it_had(small: Path) -> None:
    command = [sys.executable, "-c", FILLS, str(small), str(LIMIT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin and worker.stdout
        worker.stdout.readline()
        watch = MemoryWatch(lambda: [worker.pid])
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        worker.stdout.readline()
        watch.look()
        assert " of 0.1 GiB were in use" in watch.why_killed(worker.pid), "the limit that is near is the worker's own"
        assert not watch.was_out_of_memory()
        worker.communicate(b"\n")
        assert worker.returncode == -9
    assert watch.was_out_of_memory()
    why = watch.why_killed(worker.pid)
    told = "killed by the kernel, as its cgroup was out of memory; "
    can_know = _may_read_kernel_log()
    assert why.startswith(told if can_know else "the kernel ran out of memory and killed a process")
    assert re.search(r"; \d+\.\d of \d+\.\d GiB were in use, 0\.[01] GiB by this worker$", why)
    if can_know:
        assert watch.why_killed(0) == why, "of a container's workers no pid is known, but who the kernel killed is"


def test_of_another_sigkill_it_says_that_it_was_not_gpuctl_and_what_was_in_use() -> None:
    watch = MemoryWatch(lambda: [os.getpid()])
    assert re.fullmatch(
        r"not sent by gpuctl: out of memory, or by hand\?; .* GiB were in use, \d+\.\d GiB by this worker",
        watch.why_killed(os.getpid()),
    )
    assert not watch.was_out_of_memory()


def test_what_is_told_of_a_worker_was_in_use_while_it_lived() -> None:
    """The others of its node may end long after it."""
    holds = "block = b'x' * (300 << 20); print(flush=True); input()"
    uses = iter([(9 << 30, 2 << 30), (8 << 30, 2 << 30)])  # nearer to its limit than any cgroup of this machine
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout
        worker.stdout.readline()
        watch = MemoryWatch(lambda: [worker.pid, os.getpid()], lambda: next(uses))
        watch.look()
        worker.kill()
        until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE, "the worker to be a zombie")
        watch.look()
        assert watch.why_killed(worker.pid).endswith("; 9.0 of 2.0 GiB were in use, 0.3 GiB by this worker")
        assert "; 8.0 of 2.0 GiB were in use, " in watch.why_killed(os.getpid())
