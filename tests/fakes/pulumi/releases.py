"""A server on loopback in place of get.pulumi.com/releases, with small archives: a CLI that is a shell script, and a
plug-in. It answers as CloudFront before a bucket does: ranges, and 403 for what it does not have. What a test asks it
to do wrong, it does.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gpuctl.stacks.engine.pulumi_install import CLI, Plugin, needed_plugin
from tests.waiting import PATIENCE_S

AWS: Plugin = needed_plugin("aws")
_X64 = platform.machine().lower() in ("x86_64", "amd64")
CLI_ARCHIVE = f"/sdk/pulumi-v{CLI}-linux-{'x64' if _X64 else 'arm64'}.tar.gz"
CLI_SUMS = f"/sdk/pulumi-{CLI}-checksums.txt"
PLUGIN_ARCHIVE = f"/plugins/pulumi-resource-aws-v{AWS.version}-linux-{'amd64' if _X64 else 'arm64'}.tar.gz"
PLUGIN_SUMS = f"/plugins/pulumi-aws_{AWS.version}_checksums.txt"
PROGRAM = """#!/bin/sh
# Installs a plug-in as pulumi does: unpacked in place, beside a mark that it is not whole yet.
[ "$1" = --non-interactive ] && shift
case "$1 $2 $3" in
version*) echo vVERSION ;;
"plugin install resource")
    into=${PULUMI_HOME:-$HOME/.pulumi}/plugins/resource-$4-v$5
    mkdir -p "$into" && : >"$into.partial"
    if [ "$6" = --file ]; then
        tar xzf "$7" -C "$into" 2>/dev/null || { echo "error: [resource plugin $4-$5] unexpected EOF" >&2; exit 255; }
    else
        echo "$PULUMI_PLUGIN_DOWNLOAD_URL_OVERRIDES" >"$into/pulumi-resource-$4"
    fi
    rm "$into.partial" ;;
*) echo "error: unknown command \\"$*\\"" >&2; exit 255 ;;
esac
"""


@dataclass
class Releases:
    """What is served, and how badly."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """By path."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    cut: dict[str, list[int]] = field(default_factory=dict)
    """Bytes after which the next answers of a path are broken off."""
    status: dict[str, int] = field(default_factory=dict)
    """What a path is answered with instead."""
    knows_ranges: bool = True
    tells_length: bool = True
    hold_after: int = -1
    """Bytes of an archive after which it waits for ``go``; negative: it does not."""
    held: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def publish_cli(self, program: str = PROGRAM, version: str = CLI) -> None:
        big = os.urandom(2_000_000)  # not worth compressing, as the real ones
        script = program.replace("VERSION", version).encode()
        self.files[CLI_ARCHIVE] = archive({"pulumi/pulumi": script, "pulumi/pulumi-language-python": big})
        self.list_cli()

    def list_cli(self) -> None:
        """The checksums of what is there now, in the way of ``sha256sum``."""
        digest = hashlib.sha256(self.files[CLI_ARCHIVE]).hexdigest()
        name = CLI_ARCHIVE.rpartition("/")[2]
        other = f"{'0' * 64}  pulumi-v{CLI}-windows-x64.zip"
        self.files[CLI_SUMS] = f"{other}\n{digest}  {name}\n".encode()

    def publish_plugin(self) -> None:
        """With checksums in the way of ``shasum ./*.tar.gz``, which is SHA-1."""
        program = b"#!/bin/sh\nexit 1\n"
        self.files[PLUGIN_ARCHIVE] = archive({"pulumi-resource-aws": program, "README.md": os.urandom(1_500_000)})
        digest = hashlib.sha1(self.files[PLUGIN_ARCHIVE]).hexdigest()
        self.files[PLUGIN_SUMS] = f"{digest}  ./{PLUGIN_ARCHIVE.rpartition('/')[2]}\n".encode()

    def fetched(self, path: str) -> list[str]:
        """The ranges that were asked for, in turn; empty for all of it."""
        return [part for method, one, part in self.asked if (method, one) == ("GET", path)]


def archive(files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return written.getvalue()


@contextmanager
def serving() -> Iterator[Releases]:
    releases = Releases()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None: ...

        def _answer(self, *, body: bool) -> None:
            part = self.headers.get("Range", "")
            releases.asked.append((self.command, self.path, part))
            data = releases.files.get(self.path)
            status = releases.status.get(self.path, 200 if data is not None else 403)
            if data is None or status != 200:
                self.send_error(status)
                return
            start = int(part.removeprefix("bytes=").rstrip("-")) if part and releases.knows_ranges else 0
            if part and releases.knows_ranges and start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            if releases.tells_length:
                self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if body:
                self._send(data[start:])

        def _send(self, data: bytes) -> None:
            cuts = releases.cut.get(self.path, [])
            data = data[: cuts.pop(0)] if cuts else data
            if releases.hold_after >= 0 and self.path in (CLI_ARCHIVE, PLUGIN_ARCHIVE):
                self.wfile.write(data[: releases.hold_after])
                self.wfile.flush()
                releases.held.set()
                releases.go.wait(PATIENCE_S)
                data = data[releases.hold_after :]
            for at in range(0, len(data), 50_000):
                self.wfile.write(data[at : at + 50_000])

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None: ...  # a client that was killed

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    releases.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield releases
    finally:
        releases.go.set()
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)
