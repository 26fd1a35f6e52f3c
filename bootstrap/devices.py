"""What accelerators a node has, found without importing torch."""

from __future__ import annotations

import subprocess


def found_devices() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs, as ``nvidia-smi -L`` gives them; empty on a machine without."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.stdout.splitlines() if line.startswith("GPU "))
