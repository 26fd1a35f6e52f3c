"""An image for tests of jobs in containers: an empty root, into which ``options`` put this machine's programs and the
Python that runs the tests. So it is real but small, has torch, and lacks gpuctl itself as most images do.

Skips where there is no Docker or Podman that works.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import pytest

from gpuctl.bootstrap.containers.command_lines import FOLDER_LABEL, ContainerRuntime, remove_command
from tests.waiting import PATIENCE_S

IMAGE = "localhost/gpuctl-test:2"
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp")


@dataclass(frozen=True, slots=True)
class Found:
    """``why`` there is no ``program``; or the program, with the options that a container here needs."""

    program: str = ""
    options: tuple[str, ...] = ()
    why: str = ""


def runtime() -> str:
    """The program that runs containers here, with ``IMAGE`` in it. Skips if there is none."""
    if not _found().program:
        pytest.skip(_found().why)
    return _found().program


def options() -> list[str]:
    """Of the program's ``run``."""
    return list(_found().options)


def build_options() -> list[str]:
    """Of the program's ``build``, so that steps find this machine's programs. Skips where it cannot mount any."""
    if runtime().endswith("docker"):
        pytest.skip("docker build mounts no folders of the machine")
    at = options().index("--env")  # which would be one of the image's own
    return [*options()[:at], *options()[at + 2 :]]


@functools.cache
def _found() -> Found:
    if sys.platform != "linux" or not Path("/lib").is_symlink():
        return Found(why="containers are tested on Linux with a merged /usr")
    why = "neither docker nor podman is installed (.ci/install-system)"
    for program in filter(None, (shutil.which(name, path=_PATH) for name in ("docker", "podman"))):
        if (said := ask(program, "info")).returncode != 0:
            why = f"{program} does not answer: {said.stderr.strip()[-200:]}"
            continue
        if ask(program, "image", "inspect", IMAGE).returncode != 0:
            subprocess.run([program, "import", "-", IMAGE], input=root(), capture_output=True, timeout=PATIENCE_S)
        # crun does not know every machine's cgroups; and Debian has runc where the PATH of a plain user does not lead.
        runc = "runc" if program.endswith("docker") else shutil.which("runc", path=_PATH) or "runc"
        for more in ((), ("--runtime", runc)):
            needed = (*_options(), *more)
            tried = ask(program, "run", "--rm", "--network", "host", *needed, IMAGE, "true")
            if tried.returncode == 0:
                return Found(program, needed)
            why = f"{program} runs nothing here: {tried.stderr.strip()[-200:]}"
    return Found(why=why)


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S)


def left(folder: Path | str) -> list[str]:
    """Containers, running or not, that the node in ``folder`` has started."""
    return ask(runtime(), "ps", "-aq", "--filter", f"label={FOLDER_LABEL}={folder}").stdout.split()


def clear(folder: Path | str) -> None:
    """End and remove what ``left`` finds."""
    if names := left(folder):
        kind: Literal["docker", "podman"] = "podman" if "podman" in runtime() else "docker"
        ask(*remove_command(ContainerRuntime(kind, runtime()), names))


def root(*more: str) -> bytes:
    """A tar of a root without a single file, and with ``more`` folders."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name in (*_FOLDERS, *more):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            tar.addfile(folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
    return held.getvalue()


def _options() -> list[str]:
    """This machine's programs and Python in the container, and limits that a machine within a machine may set."""
    python = Path(sys.prefix)
    mounted = {"/usr", str(python), str(Path(sys.base_prefix).resolve()), *_libraries()}
    outside = [path for path in sorted(mounted) if path == "/usr" or not path.startswith("/usr/")]
    options = [word for path in outside for word in ("--volume", f"{path}:{path}:ro")]
    for name, limit in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        most = min([4096, *(value for value in resource.getrlimit(limit) if value > 0)])
        options += ["--ulimit", f"{name}={most}:{most}"]
    return [*options, "--env", f"PATH={python}/bin:/usr/bin:/bin"]


def _libraries() -> list[str]:
    """Where an interpreter that was built by hand has been put: a virtual environment only links to it."""
    executable = Path(sys.executable)
    return [str(executable.parent.parent.resolve()), str(executable.resolve().parents[1])]


@contextmanager
def registry(gate: threading.Event) -> Iterator[str]:
    """Serves one image, and takes others; yields its name, and its content only once ``gate`` is open."""
    layer = root(uuid.uuid4().hex)  # no part of it has ever been pulled
    config = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64"),
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    ).encode()
    kind = "application/vnd.oci.image"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": {"mediaType": f"{kind}.config.v1+json", "digest": _digest(config), "size": len(config)},
            "layers": [{"mediaType": f"{kind}.layer.v1.tar", "digest": _digest(layer), "size": len(layer)}],
        }
    ).encode()
    held = {_digest(data): data for data in (layer, config)}
    uploads: dict[str, bytes] = {}
    manifests: dict[str, tuple[bytes, str]] = {"tiny/1": (manifest, f"{kind}.manifest.v1+json")}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = re.fullmatch(r"/v2/(?:([^?]+)/(manifests|blobs)/([^/?]+))?", self.path)
            if found is None or (found[2] == "blobs" and found[3] not in held):
                self._answer(b"", status=404)
            elif found[2] == "manifests":
                data, media = manifests.get(f"{found[1]}/{found[3]}", (b"", ""))
                self._answer(data, media, status=200 if data else 404)
            elif found[2] == "blobs":
                gate.wait(PATIENCE_S)
                self._answer(held[found[3]], "application/octet-stream")
            else:
                self._answer(b"{}", "application/json")

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self) -> None:
            """Of https://distribution.github.io/distribution/spec/api/, what a push needs."""
            self._take()
            self._answer(b"", status=202, Location=f"{self.path}{uuid.uuid4().hex}", Range="0-0")

        def do_PATCH(self) -> None:
            data = uploads.setdefault(self.path, b"") + self._take()
            uploads[self.path] = data
            self._answer(b"", status=202, Location=self.path, Range=f"0-{len(data) - 1}")

        def do_PUT(self) -> None:
            path, _, query = self.path.partition("?")
            data = uploads.pop(path, b"") + self._take()
            if query.startswith("digest="):
                held[unquote(query.removeprefix("digest="))] = data
            else:
                name, _, tag = path.removeprefix("/v2/").partition("/manifests/")
                manifests[f"{name}/{tag}"] = manifests[f"{name}/{_digest(data)}"] = (data, self.headers["Content-Type"])
            self._answer(b"", status=201, Location=path, **{"Docker-Content-Digest": _digest(data)})

        def _take(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def _answer(self, data: bytes, kind: str = "", status: int = 200, **headers: str) -> None:
            self.send_response(status)
            headers = {"Content-Type": kind, "Docker-Content-Digest": _digest(data), **headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                with suppress(OSError):  # who asked has broken off
                    self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        name = f"127.0.0.1:{server.server_port}/tiny:1"
        try:
            yield name
        finally:
            gate.set()
            server.shutdown()
            ask(runtime(), "rmi", name)


def trusting(folder: Path, image: str) -> dict[str, str]:
    """Variables that have Podman ask this registry without TLS, as Docker does on loopback."""
    path = folder / "registries.conf"
    path.write_text(f'[[registry]]\nlocation = "{image.partition("/")[0]}"\ninsecure = true\n')
    return {"CONTAINERS_REGISTRIES_CONF": str(path)}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
