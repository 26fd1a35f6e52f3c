"""gpuctl for the nodes: this very version as a wheel, and the pins it was tested with, put into the cluster's bucket.

The wheel is made of the installed files, without network and without a build backend, and is the same bytes every
time. It comes out the same from a checkout (an editable install) and from an installed wheel.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gpuctl
from gpuctl.bootstrap.node_spec import Package
from gpuctl.cluster import distribution, layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.interface import Store

PINS = "constraints.txt"
_STEM = f"{distribution.NAME.replace('-', '_')}-{gpuctl.__version__}"
"""Of the wheel's name, as the format of wheels spells it."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can say."""
_SCHEME = "Wheel-Version: 1.0\nGenerator: gpuctl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True, slots=True)
class BuiltPackage:
    """The package for nodes, built and not yet uploaded."""

    package: Package
    files: Mapping[str, bytes]
    """By key below the cluster's prefix."""


def build(extras: tuple[str, ...] = ("train",)) -> BuiltPackage:
    """Raises ``GpuctlError`` if this gpuctl is not installed."""
    made = wheel()
    pins = (_folder() / PINS).read_bytes()
    found = Package(
        wheel=layout.package(_sha256(made), f"{_STEM}-py3-none-any.whl"),
        sha256=_sha256(made),
        constraints=layout.package(_sha256(pins), PINS),
        constraints_sha256=_sha256(pins),
        extras=extras,
    )
    return BuiltPackage(found, {found.wheel: made, found.constraints: pins})


def send(bucket: Store, built: BuiltPackage) -> None:
    """Each file is below its own digest; what is there already is not sent again. Raises ``StoreError`` and
    ``StoreUnavailable`` as the bucket does."""
    for key, data in built.files.items():
        bucket.create(key, data)


def publish(bucket: Store, extras: tuple[str, ...] = ("train",)) -> Package:
    """Build the package and upload it."""
    built = build(extras)
    send(bucket, built)
    return built.package


def wheel() -> bytes:
    """A wheel of the gpuctl that runs. Raises ``GpuctlError`` if it is not installed."""
    folder = _folder()
    info = f"{_STEM}.dist-info"
    files = {f"gpuctl/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in _files(folder)}
    files |= {f"{info}/{name}": data for name, data in _about().items()}
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            about = zipfile.ZipInfo(name, _EPOCH)
            about.external_attr = 0o100644 << 16
            archive.writestr(about, data, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _folder() -> Path:
    return Path(gpuctl.__file__).parent


def _files(folder: Path) -> list[Path]:
    """Those of the package, through the links that a checkout has in it."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            found += _files(path)
        elif path.suffix not in (".pyc", ".pyo"):
            found.append(path)
    return found


def _about() -> dict[str, bytes]:
    """The files that pip reads of a wheel, as they were installed here."""
    try:
        installed = importlib.metadata.distribution(distribution.NAME)
    except importlib.metadata.PackageNotFoundError as error:
        raise GpuctlError(
            "this gpuctl is not installed, so there is no package for nodes", "pip install -e ."
        ) from error
    said = {"METADATA": installed.read_text("METADATA"), "entry_points.txt": installed.read_text("entry_points.txt")}
    return {**{name: text.encode() for name, text in said.items() if text}, "WHEEL": _SCHEME.encode()}


def _record(files: dict[str, bytes], own: str) -> bytes:
    rows = [f"{name},sha256={_urlsafe(data)},{len(data)}" for name, data in files.items()]
    return "".join(f"{row}\n" for row in [*rows, f"{own},,"]).encode()


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
