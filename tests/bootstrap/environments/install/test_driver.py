"""A torch of a lock's own beside the node's driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.bootstrap.environments.install.driver import check
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed

CUDA_13 = {"torch": "2.15.0", "nvidia-cuda-runtime": "13.0.96"}
CUDA_12 = {"torch": "2.8.0", "nvidia-cuda-runtime-cu12": "12.8.90"}


@pytest.mark.parametrize(
    ("packages", "driver", "fits"),
    [
        (CUDA_13, "580.65.06", True),
        (CUDA_13, "595.10", True),
        (CUDA_13, "575.51.03", False),
        (CUDA_12, "525.60.13", True),
        (CUDA_12, "470.82.01", False),
        ({"torch": "2.8.0+cu118"}, "470.82.01", True),
        ({"torch": "2.8.0+cu126"}, "470.82.01", False),
        ({"torch": "2.8.0+cpu"}, "470.82.01", True),
        ({"torch": "2.30", "nvidia-cuda-runtime": "14.1"}, "575.51.03", False),
        ({"nvidia-cuda-runtime": "13.0"}, "470.82.01", True),
        (CUDA_13, "", True),
        (CUDA_13, "unreadable", True),
    ],
)
def test_a_torch_for_a_newer_cuda_than_the_driver_knows_is_refused(
    tmp_path: Path, packages: dict[str, str], driver: str, fits: bool
) -> None:
    path = tmp_path / "version"
    if driver:
        path.write_text(f"{driver}\n")
    if fits:
        check(packages, "uv.lock", path)
        return
    with pytest.raises(EnvironmentFailed, match=r"uv\.lock: torch .* is built for CUDA \d+, which needs") as raised:
        check(packages, "uv.lock", path)
    assert f"and the node has {driver}" in str(raised.value)
