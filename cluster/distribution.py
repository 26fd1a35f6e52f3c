"""What package indexes call gpuctl, which is somebody else's name there; the command and the import name are gpuctl."""

from __future__ import annotations

NAME = "gpuctl-spot"


def pip_install(*extras: str) -> str:
    """The command that brings any one of ``extras``.

    >>> pip_install("aws", "gcp")
    "pip install 'gpuctl-spot[aws]' or 'gpuctl-spot[gcp]'"
    """
    return "pip install " + " or ".join(f"'{NAME}[{extra}]'" for extra in extras)
