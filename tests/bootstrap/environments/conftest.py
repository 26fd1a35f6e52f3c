"""A package index with a few small packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.bootstrap.environments.facts import NodeFacts
from tests.fakes.package_index import PackageIndex, serving, write_wheel

FACTS = NodeFacts(python="cpython-3.11", platform="linux-x86_64-glibc2.36", torch="2.13.0+cpu", needs=("mspec>=2,<3",))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PackageIndex]:
    folder = tmp_path / "index"
    for version in ("1.0", "2.0"):
        write_wheel(folder, "alpha", version, requires=("beta",))
    write_wheel(folder, "beta", "1.5", scripts={"beta-tool": "beta:main"}, files={"beta.py": "def main(): print('b')"})
    write_wheel(folder, "torch", "2.13.0", requires=("nvidia-big",))
    write_wheel(folder, "torch", "2.15.0", requires=("nvidia-big",))
    write_wheel(folder, "nvidia-big", "13.0")
    write_wheel(folder, "vision", "0.28", requires=("torch==2.13.0",))
    write_wheel(folder, "vision", "0.29", requires=("torch==2.15.0",))
    for version in ("1.0", "2.5"):
        write_wheel(folder, "mspec", version)
    write_wheel(folder, "other-python", "1.0", tag="cp27-cp27m-any")
    (folder / "source_only-1.0.tar.gz").write_bytes(b"")
    with serving(PackageIndex(folder)) as found:
        yield found
