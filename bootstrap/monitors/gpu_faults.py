"""What the driver's words about a GPU mean: whether it is ill, so that no job may use its node any more, or only to be
told of.

Sources: docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog"; NVML's reference. What is an
application's own error is as in NVIDIA's k8s-device-plugin, which skips the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_OF_THE_APPLICATION = frozenset({13, 31, 43, 45, 68, 109})
"""Out-of-range access, page fault, a channel that a crash has torn down: a bug of the script, and the GPU is well."""
_TOLD = {
    63: "a row of its memory is to be remapped at the next reset",
    92: "many single-bit memory errors",
    94: "a memory error that was contained",
}
_ILL = {
    46: "it stopped processing",
    48: "an uncorrectable memory error",
    62: "its micro-controller has halted",
    64: "a row of its memory cannot be remapped",
    74: "an NVLink error",
    79: (_LOST := "it has fallen off the bus"),
    95: "an uncontained memory error",
    110: "a security fault",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    136: "the training of a link has failed",
    140: "an unrecovered memory error",
    143: "it could not be initialized",
    155: "an NVLink error",
    156: "a part of it is retired",
    158: "it does not answer",
}

_THROTTLED = {0x40: "hardware thermal slowdown", 0x20: "software thermal slowdown", 0x80: "power brake"}
"""``nvmlClocksEventReason*``; the power cap (0x4) is how a GPU at work is meant to run."""
THROTTLED_S = 60.0
"""Shorter ones come and go."""


class Fault(NamedTuple):
    """Something that is wrong with a GPU."""

    words: str
    is_ill: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What NVML says of a GPU at one moment; ``None`` where the GPU cannot tell."""

    lost: bool = False
    uncorrected: int | None = None
    """Memory errors that were not corrected, since the driver was loaded."""
    remap_pending: bool = False
    remap_failed: bool = False
    throttled: int = 0
    """``nvmlDeviceGetCurrentClocksEventReasons``."""
    celsius: int | None = None


def of_xid(gpu: int, code: int, recovery: int | None) -> Fault | None:
    """Judge an Xid error. ``recovery`` is NVML's field of that name, where the driver has it: 0 if the GPU needs none,
    and then it is well, whatever the table says."""
    if code in _OF_THE_APPLICATION:
        return None
    what = _ILL.get(code) or _TOLD.get(code) or "see NVIDIA's Xid catalog"
    is_ill = code in _ILL if recovery is None else recovery != 0
    return Fault(f"GPU {gpu}: {what} (Xid {code})", is_ill)


def of_reading(gpu: int, reading: Reading, throttled_s: float) -> list[Fault]:
    """Judge a reading. ``throttled_s``: for how long the GPU has been slowed down without a break."""
    if reading.lost:
        return [Fault(f"GPU {gpu}: {_LOST}", True)]
    found = []
    if reading.uncorrected:
        found.append(Fault(f"GPU {gpu}: {reading.uncorrected} uncorrected memory errors", True))
    if reading.remap_failed:
        found.append(Fault(f"GPU {gpu}: {_ILL[64]}", True))
    elif reading.remap_pending:
        found.append(Fault(f"GPU {gpu}: {_TOLD[63]}", False))
    if is_throttled(reading) and throttled_s >= THROTTLED_S:
        why = ", ".join(words for bit, words in _THROTTLED.items() if reading.throttled & bit)
        warm = "" if reading.celsius is None else f", {reading.celsius} C"
        found.append(Fault(f"GPU {gpu} is throttled: {why}{warm}", False))
    return found


def is_throttled(reading: Reading) -> bool:
    return any(reading.throttled & bit for bit in _THROTTLED)
