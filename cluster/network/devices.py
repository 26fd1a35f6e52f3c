"""The cards that jobs run on, as the kernel lists them: GPUs that NVIDIA's driver has, and the network cards below
``/sys/class/infiniband``, which bypass the kernel.

Three kinds of the latter share that folder and must not be mixed up: AWS's EFA, InfiniBand, and Ethernet cards that can
do RoCE. The last are on every Azure machine with accelerated networking, where they are no fabric at all.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpuctl.cluster.network.records import CardKind, RdmaDevice

CLASS = Path("/sys/class/infiniband")
GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_with_driver(folder: Path = GPUS) -> int:
    """How many GPUs NVIDIA's driver has taken; none where it is not loaded."""
    return len(list(folder.glob("*")))


def found_cards(folder: Path = CLASS) -> tuple[RdmaDevice, ...]:
    """RDMA devices by name; none on another system than Linux."""
    return tuple(_card(device) for device in sorted(folder.glob("*")) if device.is_dir())


def _card(device: Path) -> RdmaDevice:
    ports = sorted(device.glob("ports/*"))
    rates = [float(rate[1]) for port in ports if (rate := re.match(r"([\d.]+) Gb", _text(port / "rate")))]
    return RdmaDevice(
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
