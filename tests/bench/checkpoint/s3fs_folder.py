"""s3fs in a folder of its own: it pins another botocore than the one that the tests' boto3 needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("s3fs==2026.9.0", "aiobotocore==3.10.0", "aiohttp==3.14.5", "botocore==1.43.117")
_CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"
_OTHERWISE = ("boto3", "botocore", "s3transfer")
_PATIENCE_S = 300.0


def installed(build: Path) -> Path:
    """The folder below ``build`` that must come first on Python's path. Filled once, from the package index.

    Raises ``RuntimeError`` with what pip said, ``subprocess.TimeoutExpired``.
    """
    folder = build / VERSIONS[0].replace("==", "-")
    if folder.exists():
        return folder
    print(f"installing {VERSIONS[0]} into {folder} (only this once)", file=sys.stderr, flush=True)
    build.mkdir(exist_ok=True)
    lines = _CONSTRAINTS.read_text().splitlines(keepends=True)
    constraints = build / "s3fs-constraints.txt"
    constraints.write_text("".join(line for line in lines if line.partition("==")[0] not in _OTHERWISE))
    partial = build / "s3fs.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(partial), "-c", str(constraints)]
    env = {**os.environ, "PIP_CONSTRAINT": ""}  # that of ``make`` is the whole file
    done = subprocess.run([*command, *VERSIONS], capture_output=True, text=True, timeout=_PATIENCE_S, env=env)
    if done.returncode:
        raise RuntimeError(f"{VERSIONS[0]} could not be installed: {done.stderr.strip()[-300:]}")
    partial.rename(folder)
    return folder
