"""Workers that have used gloo end, with their script's exit code."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from gpuctl.trainers import gloo_exit
from gpuctl.trainers.launchers.torchrun import WORKER_SITE
from tests.gloo_lines import without_gloo
from tests.waiting import until

DESTROYS = """
import os
import torch.distributed as dist
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
print(dist.is_initialized(), threads() - before)
"""


def python(code: str, *path: str) -> str:
    """What ``code`` prints in a new interpreter that has ``path`` as its ``PYTHONPATH``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return without_gloo(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_group_of_gloo_outlives_its_destruction_in_interpreters_that_a_worker_starts() -> None:
    """Else whoever drops the last reference to it may wait for ever."""
    assert python(DESTROYS) == "False 0\n", "torch frees it, with its threads"
    initialized, more = python(DESTROYS, WORKER_SITE).split()
    assert initialized == "False" and int(more) > 0


def test_the_sitecustomize_that_was_there_is_run_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    assert python("print('script')", WORKER_SITE, str(tmp_path)) == "theirs\nscript\n"
    assert python("print('script')", WORKER_SITE) == "script\n"


def c10d_with(groups: dict[str, str]) -> ModuleType:
    """Stands in for torch's module. ``groups``: each with its configuration, as torch writes it."""
    module = ModuleType("c10d")
    world = SimpleNamespace(pg_map=dict.fromkeys(groups), pg_backend_config=dict(groups))
    vars(module).update(_world=world, destroy_process_group=lambda _group=None: world.pg_map.clear())
    return module


def test_only_groups_of_gloo_are_kept_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(gloo_exit, "_kept", kept)
    c10d = c10d_with({"both": "cpu:gloo,cuda:nccl", "of GPUs": "cuda:nccl"})
    gloo_exit.keep_process_groups(c10d)
    gloo_exit.keep_process_groups(c10d)
    c10d.destroy_process_group()
    assert kept == ["both"]
    assert not c10d._world.pg_map, "torch's own function did its part"


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells")
def test_a_thread_at_work_outside_of_python_is_seen() -> None:
    data, done = bytes(10_000_000), threading.Event()

    def work() -> None:
        while not done.is_set():
            hashlib.sha256(data)  # without the GIL

    thread = threading.Thread(target=work, name="works")
    thread.start()
    try:
        until(gloo_exit._others_are_running, "the thread to be seen")
    finally:
        done.set()
        thread.join()
    until(lambda: not gloo_exit._others_are_running(), "nobody to be seen")
