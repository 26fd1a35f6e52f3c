"""NVIDIA's driver and, where GPUs are joined by NVSwitches, its fabric manager: installed on images that have none.

A driver that is there is left alone, whatever nvidia-smi says: a GPU that has fallen off the bus is for the gate to
name, and another driver on top of the image's own makes it worse. Without the fabric manager of the driver's very
version no process can use a GPU of such a machine (CUDA error 802).

Sources: docs.nvidia.com, "NVIDIA Driver Installation Guide" and "Fabric Manager User Guide"; the package's name by
azhpc-images, components/install_nvidia_fabric_manager.sh.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .packages import Packages
from .steps import sh, works

_CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
_NVIDIA, _NVSWITCH = "0x10de", "0x0680"
"""PCI vendor, and the beginning of the class: "bridge, other"."""
_MANAGER = "nvidia-fabricmanager"
_ONE_NAME_SINCE = 580
"""Drivers before have their branch in the name of the manager's package."""


def install_driver(root: Path, packages: Packages) -> None:
    """Install NVIDIA's driver. Raises ``OSError``."""
    if not _is_there(root):
        _install(packages, f"linux-headers-{os.uname().release}", "nvidia-open")
        sh("modprobe", "nvidia")
    if has_nvswitch(root):
        if not shutil.which("nv-fabricmanager"):
            version = sh("modinfo", "--field", "version", "nvidia").split()[-1]
            major = version.partition(".")[0]
            name = _MANAGER if int(major) >= _ONE_NAME_SINCE else f"{_MANAGER}-{major}"
            _install(packages, f"{name}={version}*")
        works("systemctl", "enable", "--now", f"{_MANAGER}.service")  # the gate says what does not work


def has_nvswitch(root: Path) -> bool:
    """Whether the machine has such switches to manage: Google's hosts keep theirs to themselves."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind = ((device / name).read_text() if (device / name).exists() else "" for name in ("vendor", "class"))
        if vendor.startswith(_NVIDIA) and kind.startswith(_NVSWITCH):
            return True
    return False


def _is_there(root: Path) -> bool:
    """Loaded, or to be loaded."""
    if (root / "proc/driver/nvidia/version").exists():
        return True
    found = works("modinfo", "--field", "version", "nvidia")
    if found:
        works("modprobe", "nvidia")
    return found


def _install(packages: Packages, *names: str) -> None:
    url = f"{_CUDA}/{packages.system()}/x86_64/"
    packages.install_from("driver", f"{url}3bf863cc.pub", url, "/", *names)
    packages.hold_driver()
