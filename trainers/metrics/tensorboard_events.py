"""TensorBoard event files, written by hand.

An event file is a TFRecord of protocol-buffer messages, and a scalar needs four fields of them. Writing those 60 bytes
takes microseconds and no import; TensorBoard's own writer costs 0.3 to 1.2 s of imports, in a process whose round must
be training again within 2 s of losing a node.

Sources: ``tensorflow/core/util/event.proto``, ``tensorflow/core/framework/summary.proto``,
``tensorflow/core/lib/io/record_writer.cc``.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from gpuctl.trainers.metrics.append_file import AppendFile


class EventFile:
    """A new event file in ``folder``, made when the first event is written. Events are appended unbuffered;
    a full disk drops them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendFile | None = None

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Add one event with ``values`` at ``step``; ``at`` is in seconds since the epoch."""
        summary = b"".join(_message(1, _message(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._append(_record(_double(1, at) + _varint(2, step) + _message(5, summary)))

    def _append(self, data: bytes) -> None:
        if self._file is None:
            now = time.time()
            path = self._folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.0"
            try:
                self._file = AppendFile(path)
            except OSError:  # no room even for a name
                return
            data = _record(_double(1, now) + _message(3, b"brain.Event:2")) + data
        self._file.append(data)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _message(field: int, data: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(data)) + data


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    # A number beyond 32 bits is infinite there, as a cast in C has it.
    try:
        return _number(field << 3 | 5) + struct.pack("<f", value)
    except OverflowError:
        return _number(field << 3 | 5) + struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _number(value: int) -> bytes:
    """Base-128, least significant group first; a negative number as its 64-bit two's complement."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC32C = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFF_FFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)
