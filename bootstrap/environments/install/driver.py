"""Whether the torch that a lock brings can work with the node's NVIDIA driver, asked before it is downloaded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed

_OLDEST = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""By CUDA's major version, the oldest driver that all of its releases can do with: NVIDIA, "CUDA Compatibility", minor
version compatibility."""
_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?")
_DRIVER = Path("/sys/module/nvidia/version")


def check(packages: Mapping[str, str], file: str, driver: Path = _DRIVER) -> None:
    """Raises ``EnvironmentFailed`` if the torch in ``packages`` (versions by name) was built for a newer CUDA than the
    driver knows. Nothing is said where there is no driver: then there is no GPU either."""
    cuda = _cuda_of(packages)
    has = _version(driver)
    least = _OLDEST.get(cuda or 0, max(_OLDEST.values()))
    if cuda is None or not re.fullmatch(r"\d+(\.\d+)+", has) or tuple(map(int, has.split(".")))[:2] >= least:
        return
    raise EnvironmentFailed(
        f"{file}: torch {packages['torch']} is built for CUDA {cuda}, which needs driver {least[0]}.{least[1]} or "
        f"later, and the node has {has}",
        "lock a torch for an older CUDA, or leave torch to the nodes",
    )


def _cuda_of(packages: Mapping[str, str]) -> int | None:
    """CUDA's major version for the torch that is among the packages; ``None`` if there is none, or it needs no GPU."""
    if "torch" not in packages:
        return None
    if label := re.search(r"\+cu(\d+)\d$", packages["torch"]):
        return int(label[1])
    runtimes = [version for name, version in packages.items() if _RUNTIME.fullmatch(name)]
    return int(runtimes[0].partition(".")[0]) if runtimes else None


def _version(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
