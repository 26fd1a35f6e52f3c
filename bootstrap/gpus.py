"""What accelerators a node has, found without importing torch."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuctl.cluster.errors import GpuctlError

_LIMIT_S = 60.0
"""For an answer: where the driver does not stay loaded, it takes up to 3 s for each GPU."""
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_HINT = "fix the driver or restart the machine; to train without GPUs, take nvidia-smi out of the PATH"


def found_devices(limit_s: float = _LIMIT_S, pci: Path = _PCI) -> tuple[str, ...]:
    """Names of the NVIDIA GPUs, as ``nvidia-smi -L`` gives them; empty on a machine without.

    Raises ``GpuctlError`` if it does not answer in ``limit_s`` seconds, or fails where there is a card below ``pci``: a
    node that takes its GPUs for none would train on its CPU, at the price of both. Where there is no card, a failure
    means just that: images for GPUs run on other machines too.
    """
    try:
        asked = subprocess.Popen(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError:
        return ()
    try:
        answer, _ = asked.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        asked.kill()
        # Who hangs in the driver hears no kill, so nobody here may wait for its end.
        threading.Thread(target=asked.wait, name="nvidia-smi", daemon=True).start()
        raise GpuctlError(f"nvidia-smi -L has not answered in {limit_s:g} s", _HINT) from None
    if asked.returncode == 0:
        return tuple(line.strip() for line in answer.splitlines() if line.startswith("GPU "))
    if not _has_card(pci):
        return ()
    said = (answer.strip().splitlines() or ["it printed nothing"])[0]
    raise GpuctlError(f"nvidia-smi -L fails with code {asked.returncode}: {said}", _HINT)


def visible_devices(found: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Those of ``found`` that workers with ``env`` see. All, where ``CUDA_VISIBLE_DEVICES`` has names other than
    numbers: what they stand for is not told here."""
    words = [word for word in env.get("CUDA_VISIBLE_DEVICES", "all").split(",") if word]
    if not all(word.isdecimal() for word in words):
        return tuple(found)
    return tuple(found[int(word)] for word in words if int(word) < len(found))


def _has_card(pci: Path) -> bool:
    for vendor in pci.glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _NVIDIA and (vendor.parent / "class").read_text().startswith(_DISPLAY):
                return True
        except OSError:
            continue
    return False
