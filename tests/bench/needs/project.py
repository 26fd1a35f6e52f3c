"""A locked project with some 50 packages, 500 MB unpacked, and where it is unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from uv import find_uv_bin

from gpuctl.cluster.environments import source
from gpuctl.cluster.records.environments import EnvironmentSource

_PACKAGES = [
    "transformers",
    "datasets",
    "pandas",
    "scipy",
    "scikit-learn",
    "pyarrow",
    "sentencepiece",
    "einops",
    "matplotlib",
]
_MEMORY = Path("/dev/shm")
_ROOM = 8e9


def lock(folder: Path) -> EnvironmentSource:
    """Write the project into ``folder``, with the newest versions there are."""
    folder.mkdir(parents=True, exist_ok=True)
    quoted = ", ".join(f'"{name}"' for name in _PACKAGES)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "needs"\nversion = "0"\nrequires-python = "=={_python()}.*"\ndependencies = [{quoted}]\n'
        f"[tool.uv]\nenvironments = [\"sys_platform == '{sys.platform}'\"]\n"
    )
    subprocess.run([find_uv_bin(), "lock", "-q", "--python", sys.executable], cwd=folder, env=variables(), check=True)
    found = source.find(folder)
    assert found is not None
    return found.source


def variables(**more: str) -> dict[str, str]:
    """Those of this process, without its virtual environment."""
    inherited = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return {**inherited, "UV_PYTHON_DOWNLOADS": "never", **more}


def place(root: Path) -> tuple[Path, str]:
    """A folder for what is unpacked, in memory where there is room, and what to say of it."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
        folder = _MEMORY / root.parent.name / root.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder, "in memory"
    return root, "on this disk"


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
