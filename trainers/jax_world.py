"""``jax.distributed.initialize`` without arguments joins the round that gpuctl runs the script in.

JAX reads the coordinator's address from the environment, but neither the number of processes nor which one this is, and
its time-outs are arguments only (jax 0.10, ``jax/_src/distributed.py``). Its heartbeat is 100 s by default: so long
would a process hang whose peer is lost, if nobody ended it.

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "jax.distributed"
_HEARTBEAT_S = 10
"""Behind the agents, which end the processes of a lost round before that."""


def initialize(**options: Any) -> None:
    """Join this round's processes: ``jax.distributed.initialize`` with all that it has to be told.

    Where there is only this process, as in a notebook, nothing is to be joined, and nothing happens.

    Args:
        options: Of ``jax.distributed.initialize``; those given here count.
    """
    import jax  # type: ignore[import-not-found,unused-ignore]

    if options or place(os.environ):
        jax.distributed.initialize(**{**_known(jax.distributed.initialize, place(os.environ)), **options})


def place(env: Mapping[str, str]) -> dict[str, Any]:
    """The arguments for the process with these variables: JAX's, or those of torchrun and ``gpuctl mingle``. None of
    them if it is alone."""
    size = env.get("JAX_NUM_PROCESSES") or env.get("WORLD_SIZE", "1")
    rank = env.get("JAX_PROCESS_ID") or env.get("RANK", "0")
    address = env.get("JAX_COORDINATOR_ADDRESS") or _address(env)
    if not address or (size == "1" and "JAX_NUM_PROCESSES" not in env):
        return {}
    return {
        "coordinator_address": address,
        "num_processes": int(size),
        "process_id": int(rank),
        "heartbeat_timeout_seconds": _HEARTBEAT_S,
    }


def _address(env: Mapping[str, str]) -> str:
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}" if host and port else ""


def _known(function: Callable[..., None], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that this version of JAX has."""
    there = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in there}


def install() -> None:
    """In a process of ``--launcher jax``: whenever JAX is imported, have its ``initialize`` know the round."""
    if os.environ.get("GPUCTL_LAUNCHER") == "jax":
        sys.meta_path.insert(0, _OnImport())


def teach(distributed: ModuleType) -> None:
    """Replace ``initialize`` in the module ``jax.distributed``, once."""
    original = distributed.initialize
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **options: Any) -> None:
        given = inspect.signature(original).bind_partial(*args, **options).arguments
        found = {name: value for name, value in place(os.environ).items() if given.get(name) is None}
        original(**{**given, **_known(original, found)})

    setattr(distributed, "initialize", initialize)  # noqa: B010


class _OnImport(importlib.abc.MetaPathFinder):
    """Lets ``teach`` know the module once it is imported."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                teach(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
