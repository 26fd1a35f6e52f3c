"""How a worker that has used gloo ends: it does, and with the exit code of its script.

After the last backward, a thread of gloo's process group drops its last piece of work, which holds a Python object: it
waits for the interpreter's lock (the GIL), with the group's own lock in hand. Two things go wrong if the script ends at
that moment (torch 2.13, DDP on CPUs; ``docs/decisions/0019-how-a-worker-ends.md``):

- whoever drops the last reference to the group holds the GIL and waits for the group's lock: the process hangs for
  ever (pytorch#56297). So groups that a script destroys are kept until the process ends (``keep_process_groups``).
- Python up to 3.13 ends a thread that asks for the GIL of an interpreter that is finishing, which runs into a C++
  destructor: the process is aborted, with code 134 (pytorch#179291, pytorch#190489). So the interpreter does not begin
  to finish before such threads are done (``settle``).

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_kept: list[Any] = []
"""Process groups."""
_installed: list[Any] = []
_LEAST_S = 0.05
"""Ten times as long as a thread may wait to be given the GIL (sys.getswitchinterval)."""
_MOST_S = 2.0
"""A thread of the script's own may be busy for ever."""
_LOOK_S = 0.005


def install() -> None:
    """Do both in this process, whenever it imports ``torch.distributed``. Call it before the script begins: what is
    registered first for the exit is called last."""
    if settle in _installed:
        return
    _installed.append(settle)
    atexit.register(settle)
    if _C10D in sys.modules:
        keep_process_groups(sys.modules[_C10D])
    else:
        sys.meta_path.insert(0, _OnImport())


def keep_process_groups(c10d: ModuleType) -> None:
    """Have ``destroy_process_group`` shut groups down as ever, but free no gloo group's memory and threads.

    ``c10d``: the module ``torch.distributed.distributed_c10d``, whose function is replaced, once.
    """
    destroy = c10d.destroy_process_group
    if hasattr(destroy, "__wrapped__"):
        return

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        world = getattr(c10d, "_world", None)
        configs = getattr(world, "pg_backend_config", {})
        _kept.extend(one for one in getattr(world, "pg_map", ()) if "gloo" in str(configs.get(one, "gloo")))
        destroy(group)

    for module in (c10d, sys.modules.get("torch.distributed")):
        if getattr(module, "destroy_process_group", None) is destroy:
            setattr(module, "destroy_process_group", destroy_process_group)  # noqa: B010


def settle() -> None:
    """Wait until no other thread of this process wants to run, where gloo may have some: 0.05 s, and at most 2 s."""
    world = getattr(sys.modules.get(_C10D), "_world", None)
    if not _kept and not getattr(world, "pg_map", None):
        return  # no process group was ever made
    deadline = time.monotonic() + _MOST_S
    time.sleep(_LEAST_S)
    while time.monotonic() < deadline and _others_are_running():
        time.sleep(_LOOK_S)


def _others_are_running() -> bool:
    """Whether a thread but the main one is on a processor or waits for one (Linux; elsewhere nobody tells)."""
    try:
        threads = [one for one in Path("/proc/self/task").iterdir() if one.name != str(os.getpid())]
    except OSError:
        return False
    for thread in threads:
        try:
            if (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
        except OSError:
            pass  # it has ended
    return False


class _OnImport(importlib.abc.MetaPathFinder):
    """Lets ``keep_process_groups`` know the module once it is imported."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                keep_process_groups(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
