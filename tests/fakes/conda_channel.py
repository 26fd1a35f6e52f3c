"""A conda channel in a folder, with a Python that works and small packages, as conda-build would have made them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zstandard

PLACEHOLDER = "/opt/h_env_" + "placehold_" * 24
"""What a package has where the path of its environment belongs: 255 bytes in conda-build's."""
_HERE = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}.get(platform.machine(), "linux-64")
_NOT_NEEDED = ("/test/", "/tests/", "/site-packages/", "/dist-packages/", "/idlelib/", "/config-", "/ensurepip/")


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link, in place of a file's content."""

    target: str


Content = bytes | Path | Link


class CondaChannel:
    """The channel in ``folder``; ``url`` is what an ``environment.yml`` calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for subdir in (_HERE, "noarch"):
            (folder / subdir).mkdir(parents=True)
            self._write(subdir, {})
        self.url = folder.as_uri()

    def add_python(self) -> None:
        """The Python that runs this, with its standard library."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        files: dict[str, Content] = {
            f"bin/python{version}": Path(os.path.realpath(sys.executable)),
            "bin/python": Link(f"python{version}"),
            "bin/python3": Link(f"python{version}"),
        }
        library = Path(sysconfig.get_path("stdlib")).resolve()
        for path in library.rglob("*"):
            name = f"lib/python{version}/{path.relative_to(library).as_posix()}"
            if path.is_file() and "__pycache__" not in name and not any(part in name for part in _NOT_NEEDED):
                files[name] = _as_conda_has_it(path, path.relative_to(library).as_posix())
        if "dist-packages" in (library / "site.py").read_text():  # Debian's, and frozen in its program
            files[f"lib/python{version}/dist-packages"] = Link("site-packages")
        self.add("python", platform.python_version(), files)

    def add(self, name: str, version: str, files: Mapping[str, Content], depends: tuple[str, ...] = ()) -> None:
        """A package for this platform. ``PLACEHOLDER`` in a file's content is replaced when it is installed."""
        self._add(name, version, files, depends, _HERE, {})

    def add_pure(self, name: str, version: str, depends: tuple[str, ...] = (), scripts: tuple[str, ...] = ()) -> None:
        """A module of that name for any Python, which says its version, with its metadata.

        ``scripts``: entry points, such as ``tool = module:function``.
        """
        about = f"site-packages/{name}-{version}.dist-info"
        files: dict[str, Content] = {
            f"site-packages/{name}.py": f"VERSION = {version!r}\ndef main(): print(VERSION)\n".encode(),
            f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
            f"{about}/INSTALLER": b"conda\n",
        }
        link = {"noarch": {"type": "python", "entry_points": list(scripts)}, "package_metadata_version": 1}
        self._add(name, version, files, ("python", *depends), "noarch", link)

    def _add(
        self,
        name: str,
        version: str,
        files: Mapping[str, Content],
        depends: tuple[str, ...],
        subdir: str,
        link: dict[str, object],
    ) -> None:
        stem = f"{name}-{version}-0"
        index: dict[str, object] = {
            "name": name,
            "version": version,
            "build": "0",
            "build_number": 0,
            "depends": list(depends),
            "subdir": subdir,
            **({"noarch": "python"} if link else {}),
        }
        info: dict[str, Content] = {
            "info/index.json": json.dumps(index).encode(),
            "info/paths.json": json.dumps(
                {"paths": [_path(*one) for one in files.items()], "paths_version": 1}
            ).encode(),
            "info/about.json": b"{}",
            **({"info/link.json": json.dumps(link).encode()} if link else {}),
        }
        path = self.folder / subdir / f"{stem}.conda"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", '{"conda_pkg_format_version": 2}')
            archive.writestr(f"pkg-{stem}.tar.zst", _tar(files))
            archive.writestr(f"info-{stem}.tar.zst", _tar(info))
        data = path.read_bytes()
        packages = json.loads((self.folder / subdir / "repodata.json").read_text())["packages.conda"]
        packages[path.name] = {**index, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        self._write(subdir, packages)

    def _write(self, subdir: str, packages: dict[str, object]) -> None:
        about = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages, "repodata_version": 1}
        (self.folder / subdir / "repodata.json").write_text(json.dumps(about))


def _as_conda_has_it(path: Path, name: str) -> Content:
    """A file of the standard library; of Debian's, which installs packages to folders of its own."""
    if name not in ("sysconfig.py", "sysconfig/__init__.py"):
        return path
    return path.read_bytes().replace(b"prefix_scheme = 'posix_local'", b"prefix_scheme = 'posix_prefix'")


def _path(name: str, content: Content) -> dict[str, object]:
    if isinstance(content, Link):
        return {"_path": name, "path_type": "softlink"}
    data = _bytes(content)
    mode = "binary" if b"\0" in data else "text"
    has = {"prefix_placeholder": PLACEHOLDER, "file_mode": mode} if PLACEHOLDER.encode() in data else {}
    digest = hashlib.sha256(data).hexdigest()
    return {"_path": name, "path_type": "hardlink", "sha256": digest, "size_in_bytes": len(data), **has}


def _tar(files: Mapping[str, Content]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, Link):
                info.type, info.linkname = tarfile.SYMTYPE, content.target
                tar.addfile(info)
                continue
            data = _bytes(content)
            info.size, info.mode = len(data), 0o755 if name.startswith("bin/") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return zstandard.compress(held.getvalue(), 1)


def _bytes(content: bytes | Path) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content
