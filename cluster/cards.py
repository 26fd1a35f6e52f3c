"""The network cards that bypass the kernel, as the kernel lists them below ``/sys/class/infiniband``.

Three kinds share that folder and must not be mixed up: AWS's EFA, InfiniBand, and Ethernet cards that can do RoCE. The
last are on every Azure machine with accelerated networking, where they are no fabric at all.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpuctl.cluster.network import Card, CardKind

CLASS = Path("/sys/class/infiniband")


def found_cards(folder: Path = CLASS) -> tuple[Card, ...]:
    """By name; none on a machine without, or on another system than Linux."""
    return tuple(_card(device) for device in sorted(folder.glob("*")) if device.is_dir())


def _card(device: Path) -> Card:
    ports = sorted(device.glob("ports/*"))
    rates = [float(rate[1]) for port in ports if (rate := re.match(r"([\d.]+) Gb", _text(port / "rate")))]
    return Card(
        name=device.name,
        kind=_kind(device, ports),
        active=any("ACTIVE" in _text(port / "state") for port in ports),
        gbps=sum(rates) or None,
    )


def _kind(device: Path, ports: list[Path]) -> CardKind:
    if (device / "device" / "driver").resolve().name == "efa":
        return "efa"
    return "infiniband" if any(_text(port / "link_layer") == "InfiniBand" for port in ports) else "roce"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
