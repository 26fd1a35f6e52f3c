"""A package index on loopback, as pip and uv know one (PEP 503 and 658), with small wheels; it may want a password, be
slow, or know nothing."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    requires: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
    scripts: Mapping[str, str] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    """Write a wheel of a module that says its version, or of ``files``.

    Args:
        folder: where to.
        name: of the distribution and, without ``files``, of its module.
        version: its version.
        requires: what it depends on.
        files: by path in site-packages.
        scripts: ``module:function`` by the name of a console script.
        tag: the interpreters and platforms that it is for.
    """
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-{tag}.whl"
    about = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    content = dict(files or {f"{name.replace('-', '_')}.py": f"VERSION = {version!r}\n"})
    content[f"{about}/METADATA"] = metadata
    content[f"{about}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    if scripts:
        lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
        content[f"{about}/entry_points.txt"] = f"[console_scripts]\n{lines}"
    record = "".join(f"{file},,\n" for file in (*content, f"{about}/RECORD"))
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**content, f"{about}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file, (2020, 1, 1, 0, 0, 0)), text)
    return path


class PackageIndex:
    """Serves the wheels and source distributions in ``folder``.

    ``password``: what a request must have, with the user ``user``. ``delay_s``: before each answer. ``fetched`` has the
    names of the files that were downloaded. ``failures``: so many requests are answered by 503.
    """

    def __init__(self, folder: Path, *, password: str = "", delay_s: float = 0.0) -> None:
        self.folder = folder
        self.password = password
        self.delay_s = delay_s
        self.fetched: list[str] = []
        self.failures = 0
        self.url = ""

    def answer(self, path: str, authorization: str) -> tuple[int, bytes, str]:
        """Status, content and its type."""
        time.sleep(self.delay_s)
        wanted = base64.b64encode(f"user:{self.password}".encode()).decode()
        if self.password and authorization != f"Basic {wanted}":
            return 401, b"", "text/plain"
        if self.failures:
            self.failures -= 1
            return 503, b"", "text/plain"
        parts = path.strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2:
            files = [file for file in sorted(self.folder.iterdir()) if _project(file) == parts[1]]
            return (200, _page(files), "text/html") if files else (404, b"", "text/plain")
        if parts[-1].endswith(".metadata"):
            return 200, _metadata(self.folder / parts[-1].removesuffix(".metadata")), "text/plain"
        file = self.folder / parts[-1]
        if parts[0] == "files" and file.is_file():
            self.fetched.append(file.name)
            return 200, file.read_bytes(), "application/octet-stream"
        return 404, b"", "text/plain"


@contextmanager
def serving(index: PackageIndex) -> Iterator[PackageIndex]:
    """The index at ``index.url``, for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content, kind = index.answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="packages"')
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()


def _project(file: Path) -> str:
    return file.name.removesuffix(".tar.gz").split("-")[0].replace("_", "-").lower()


def _metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")))


def _page(files: list[Path]) -> bytes:
    return f"<!DOCTYPE html><html><body>{''.join(map(_link, files))}</body></html>".encode()


def _link(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    more = ' data-core-metadata="true"' if file.suffix == ".whl" else ""  # PEP 714
    return f'<a href="/files/{file.name}#sha256={digest}"{more}>{file.name}</a>'
