"""Whether NCCL, in this very environment, can use the fabric that was paid for: what it would load is loaded.

NCCL goes on over TCP where it cannot, and says so only in its own log. So this is asked before a job's workers start,
on the node itself and in a job's image alike: it runs in any Python from 3.8 on, with the standard library only.

    python net_plugin.py efa|infiniband [FOLDER]

prints ``{"missing": [words], "library_path": [folders]}``: all is well where nothing is missing, once those folders are
searched too. In ``FOLDER`` it may put a link to torch's own CUDA runtime: EFA's plug-in opens ``libcudart.so``, and the
wheels of NVIDIA and torch bring that name with a version only.

Sources: aws-ofi-nccl, src/nccl_ofi_cuda.cpp; NCCL user guide, "NCCL_NET_PLUGIN"; NCCL, src/misc/ibvwrap.cc.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FABRICS = {"efa": "EFA", "infiniband": "InfiniBand"}
"""Those that NCCL needs a library for, as people call them."""
_CUDART = "libcudart.so"
_IN_PLACES = ("nvidia/*/lib/libcudart.so.*", "torch/lib/libcudart*.so*", "libcudart.so.*")
_ASKED = ("LD_LIBRARY_PATH", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE")
_LIMIT_S = 60
_COMPLETE: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
"""Fabrics and environments that lack nothing."""
_VERBS = "libibverbs.so.1"
_NO_CARD = "libibverbs finds no card: its providers (the package ibverbs-providers) or /dev/infiniband are not there"


def missing_in(fabric: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """What NCCL lacks in processes with ``env`` that this Python starts.

    Of an environment that lacks nothing it is not asked again; what is missing, somebody may put there.
    """
    asked = tuple((name, env[name]) for name in _ASKED if name in env)
    if (fabric, asked) in _COMPLETE:
        return ()
    missing = tuple(told([sys.executable, __file__, fabric], {"PATH": os.defpath, **dict(asked)})["missing"])
    if not missing:
        _COMPLETE.add((fabric, asked))
    return missing


def complaint(fabric: str, missing: Sequence[str], where: str) -> str:
    """Explain what is missing ``where``, and what to do."""
    return (
        f"NCCL cannot use {FABRICS[fabric]} {where}: {'; '.join(missing)}; fix that, or train over TCP, which is"
        " many times slower: gpuctl train --allow-tcp"
    )


def told(command: Sequence[str], env: Mapping[str, str]) -> dict[str, list[str]]:
    """What ``command``, which runs this file, prints; its death is something that is missing."""
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, env=env, timeout=_LIMIT_S, check=False)
        found: dict[str, list[str]] = json.loads(ran.stdout.decode() or "{}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"missing": [str(error)]}
    return found or {"missing": [f"loading it ended with {ran.returncode}"]}


# -- in a process of its own -------------------------------------------------------------------------------------------


def main(fabric: str, folder: str = "") -> None:
    missing, library_path = _efa(folder) if fabric == "efa" else (_infiniband(), [])
    print(json.dumps({"missing": missing, "library_path": library_path}))


def _efa(folder: str) -> tuple[list[str], list[str]]:
    """What is missing, and folders to search. A plug-in that has the CUDA runtime within does not ask for it."""
    named = os.environ.get("NCCL_NET_PLUGIN", "")
    if named == "none" or os.environ.get("NCCL_NET") == "Socket":
        return [], []
    names = [f"libnccl-net-{named}.so", named] if named else ["libnccl-net.so"]
    trouble = [_trouble(name) for name in names]
    if all(trouble):
        return [f"its plug-in cannot be loaded ({trouble[0]})"], []
    if any(_VERBS in library for library in _loaded()) and not _cards():  # libfabric's provider for EFA asks them
        return [_NO_CARD], []
    why = _trouble(_CUDART) if _plugin_opens_cudart() else ""
    if not why:
        return [], []
    runtime = _runtime_of_torch() if folder else None
    if not runtime:
        return [f"its plug-in needs the CUDA runtime ({why})"], []
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / _CUDART).symlink_to(runtime)
    return [], [folder]


def _infiniband() -> list[str]:
    if os.environ.get("NCCL_IB_DISABLE") == "1" or os.environ.get("NCCL_NET") == "Socket":
        return []
    why = _trouble(_VERBS)
    if why:
        return [f"its verbs cannot be loaded ({why})"]
    return [] if _cards() else [_NO_CARD]


def _cards() -> int:
    verbs, count = ctypes.CDLL(_VERBS), ctypes.c_int()
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    verbs.ibv_get_device_list(ctypes.byref(count))
    return count.value


def _trouble(library: str) -> str:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def _plugin_opens_cudart() -> bool:
    """Whether the plug-in that was just loaded has that name in it."""
    plugins = [path for path in _loaded() if "libnccl-net" in path]
    return any(_CUDART.encode() + b"\0" in Path(path).read_bytes() for path in plugins)


def _loaded() -> set[str]:
    """The files in this process's memory."""
    return {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}


def _runtime_of_torch() -> Path | None:
    """The CUDA runtime of NVIDIA's wheels, of torch's own, or of conda."""
    folders = [*sys.path, f"{sys.prefix}/lib"]
    return next((path for folder in folders for name in _IN_PLACES for path in sorted(Path(folder).glob(name))), None)


if __name__ == "__main__":
    sys.path.pop(0)  # its own folder has modules with the names of others
    main(*sys.argv[1:])
