"""The wheel that nodes install: made without network, the same every time, and one that pip installs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpuctl import __version__
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import node_package
from tests.paths import ROOT


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / f"gpuctl_spot-{__version__}-py3-none-any.whl"
    path.write_bytes(node_package.wheel())
    return path


def test_it_holds_what_the_build_backend_would_put_into_it(wheel_file: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    assert _modules(wheel_file) == _modules(built)


@pytest.mark.slow
def test_it_is_the_same_bytes_every_time() -> None:
    assert node_package.wheel() == node_package.wheel()


@pytest.mark.slow
def test_pip_installs_it_and_what_was_installed_makes_the_same_wheel(wheel_file: Path, tmp_path: Path) -> None:
    """A user's gpuctl comes from a wheel and not from a checkout."""
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target))
    subprocess.run([*pip, str(wheel_file)], check=True, timeout=120)
    again = (
        "import sys, gpuctl; from gpuctl.stacks.providers import node_package;"
        "assert gpuctl.__file__.startswith(sys.path[0]);"
        "sys.stdout.buffer.write(node_package.wheel())"
    )
    made = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {again}"],
        check=True,
        timeout=60,
        capture_output=True,
    ).stdout
    assert made == wheel_file.read_bytes()


def test_it_is_published_once_below_its_digest_with_the_pins(file_url: str) -> None:
    store = open_bucket(file_url)
    made = node_package.publish(store)
    assert node_package.publish(store) == made
    for key, digest in ((made.wheel, made.sha256), (made.constraints, made.constraints_sha256)):
        assert key.startswith(f"boot/{digest}/")
        data = store.get(key)
        assert data is not None
        assert hashlib.sha256(data).hexdigest() == digest
    assert store.get(made.constraints) == (ROOT / "constraints.txt").read_bytes()
    assert len(store.list("boot")) == 2


def _modules(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("gpuctl/")]
        return {name: archive.read(name) for name in names}
