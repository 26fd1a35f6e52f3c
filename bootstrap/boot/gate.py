"""The health gate: what the machine has, beside what its type promises. Less of it makes a job slow, or hang, at a
price of all its machines; so such a machine is never a node.

Errors of memory are counted since the driver was loaded, so on a fresh machine there are none; what a card keeps is how
it has repaired itself: rows remapped (A100 and newer) or pages retired. Sources: docs.nvidia.com, "GPU Memory Error
Management", "Dynamic Page Retirement" and "CUDA Driver API".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from .steps import sh

_LEAST_MEMORY = 0.9
"""Of the nominal: drivers and ECC keep some for themselves (23,028 MiB of an A10G's 24 GB)."""
_QUERY = "index,memory.total,ecc.errors.uncorrected.volatile.total"
_REMAPPED = "gpu_bus_id,remapped_rows.failure,remapped_rows.pending"
_RETIRED = "gpu_bus_id,retired_pages.pending"
_ASK_CUDA = (
    "import ctypes; cuda, n = ctypes.CDLL('libcuda.so.1'), ctypes.c_int();"
    " print('cuda', cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n)), n.value)"
)
_CUDA_S = "60"
_NOT_READY = 802
"""``CUDA_ERROR_SYSTEM_NOT_READY``, by the driver's API: the fabric manager has not set up the switches."""
_MANAGER = "nvidia-fabricmanager.service"


def check(promise: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` that names all that is wrong, and ``OSError`` where it cannot be found out."""
    if wrong := [*_gpus(promise), *_memory(promise), *_cuda(promise), *_fabric(promise)]:
        raise ValueError("; ".join(wrong))


def _gpus(promise: Mapping[str, Any]) -> Iterator[str]:
    if not promise["gpus"]:
        return
    rows = [line.split(", ") for line in _lines(f"--query-gpu={_QUERY}") if line.count(",") == 2]
    if len(rows) != promise["gpus"]:
        yield f"{len(rows)} GPUs found, expected {promise['gpus']}"
    for index, memory, errors in rows:
        found = float(memory) * 2**20 / 1e9
        if found < _LEAST_MEMORY * promise["gpu_memory_gb"]:
            yield f"GPU {index} has {found:.0f} GB of memory, expected {promise['gpu_memory_gb']:g}"
        if errors.strip().isdigit() and int(errors):
            yield f"GPU {index} has {int(errors)} uncorrected memory errors"


def _memory(promise: Mapping[str, Any]) -> Iterator[str]:
    """Older cards and drivers do not know what is asked: an error or ``[N/A]``, which is no fault."""
    if not promise["gpus"]:
        return
    rows = _told(f"--query-remapped-rows={_REMAPPED}", 3)
    for gpu, failed, pending in rows:
        if _is_yes(failed):
            yield f"GPU {gpu} has faulty memory that could not be remapped"
        elif _is_yes(pending):
            yield f"GPU {gpu} has faulty memory, to be remapped at its next reset"
    if any("N/A" not in failed for _, failed, _ in rows):
        return
    for gpu, pending in _told(f"--query-gpu={_RETIRED}", 2):
        if _is_yes(pending):
            yield f"GPU {gpu} has faulty memory, to be retired at its next reset"


def _cuda(promise: Mapping[str, Any]) -> Iterator[str]:
    """Whether processes can use the GPUs: nvidia-smi asks the driver, which knows nothing of the switches between them.
    In a process of its own, with a limit."""
    if not promise["gpus"]:
        return
    try:
        said = sh("timeout", _CUDA_S, "python3", "-c", _ASK_CUDA)
    except OSError as error:
        yield f"CUDA does not start: {str(error).rpartition(' exited with ')[2]}"
        return
    code, count = (int(word) for word in said.rpartition("cuda ")[2].split())
    if code == _NOT_READY:
        yield f"CUDA does not start (error {code}): the fabric manager is {_state(_MANAGER)} (journalctl -u {_MANAGER})"
    elif code:
        yield f"CUDA does not start (error {code})"
    elif count != promise["gpus"]:
        yield f"CUDA sees {count} GPUs, expected {promise['gpus']}"


def _state(unit: str) -> str:
    try:
        return sh("systemctl", "is-active", unit).strip()
    except OSError as error:
        return str(error).rpartition(": ")[2]


def _told(query: str, fields: int) -> list[list[str]]:
    """Rows of so many fields; none if there is no such question."""
    with suppress(OSError):
        rows = [[field.strip() for field in line.split(",")] for line in _lines(query)]
        return [row for row in rows if len(row) == fields]
    return []


def _is_yes(told: str) -> bool:
    return told.lower() == "yes" or (told.isdigit() and int(told) > 0)


def _lines(query: str) -> list[str]:
    return sh("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()


def _fabric(promise: Mapping[str, Any]) -> Iterator[str]:
    count, cards = {"efa": _efa, "infiniband": _infiniband}.get(promise["fabric"]), promise["fabric_cards"]
    if count and (found := count()) < cards:
        yield f"{found} working {promise['fabric']} devices, expected {cards}"


def _efa() -> int:
    return len(set(re.findall(r"^\s*domain: (\S+)", sh("fi_info", "-p", "efa", "-t", "FI_EP_RDM"), re.MULTILINE)))


def _infiniband() -> int:
    """Cards with an active port. Azure's Ethernet card is of the same make, and its transport is called InfiniBand."""
    cards = sh("ibv_devinfo").split("hca_id:")[1:]
    return sum("PORT_ACTIVE" in card and bool(re.search(r"link_layer:\s*InfiniBand", card)) for card in cards)
