"""Serves the parts of checkpoints that lie on this node's disk, and takes those that the node before it sends. The
archives of environments come the same way.

HTTP/1.1, on a port that the kernel chose, in plain text within the cluster's network. Both ends prove that they know
the cluster's token, which is not sent (see ``shared_key``): the server in its answer to the first request of a
connection, the caller with the code of each later one. What is served is not hidden, as what NCCL sends is not.

=========================================  ===========================================================================
``GET /`` with ``X-Nonce: <nonce>``        the first request: another nonce, and in ``X-Code`` the code of both
``GET /<job>/<save>/<part>``               with ``Range: bytes=<first>-<last>``: those bytes; 404 if there is no part
``PUT /<job>/<save>/<part>``               the part; 507 if it does not fit on the disk
``GET /environments/<sha256>/archive``     the same of an environment's archive (see ``bootstrap.environments``)
``PUT …`` with ``X-Same-As: <save>``       no body: it is the part that another save has here; 404 if that has none
=========================================  ===========================================================================
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gpuctl.cluster.checkpoints import replica_layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.network.addresses import family_of
from gpuctl.cluster.shared_key import Session, new_nonce

_CHUNK_BYTES = 1 << 20
_IDLE_S = 60.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_JOB = re.compile(r"[\w-][\w.-]*")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class ReplicaServer:
    """Serves the replicas on one node's disk to the round's other nodes over HTTP: ``jobs`` is the folder that its
    jobs' folders are in, ``archives`` the one that the archives of its environments are in."""

    def __init__(self, jobs: Path, token: str, archives: Path | None = None) -> None:
        self._jobs = jobs
        self._archives = archives
        self._token = token
        self._server: ThreadingHTTPServer | None = None

    def start(self, address: str) -> int:
        """Start to listen; returns the port."""
        owner = self

        class Handler(_Handler):
            token = owner._token
            jobs = owner._jobs
            archives = owner._archives

        class Server(ThreadingHTTPServer):
            address_family = family_of(address)
            daemon_threads = True

        self._server = Server((address, 0), Handler)
        threading.Thread(target=self._server.serve_forever, name="tier", daemon=True).start()
        return self._server.server_port

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    token: str
    jobs: Path
    archives: Path | None
    session: Session | None = None
    asked = 0
    """Requests with a code on this connection so far: a handler serves one connection."""

    def do_GET(self) -> None:
        if self.path == "/":
            self._meet()
            return
        path = self._path()
        if path is None:
            return
        try:
            file = path.open("rb")
        except OSError:
            self._answer(404)
            return
        with file:
            wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
            end = os.fstat(file.fileno()).st_size
            low, high = (int(wanted[1]), min(end, int(wanted[2]) + 1)) if wanted else (0, end)
            self._answer(206 if wanted else 200, max(0, high - low))
            try:
                if low < high:
                    self.connection.sendfile(file, low, high - low)
            except OSError:  # they have gone, or the disk cannot read it
                self.close_connection = True

    def do_PUT(self) -> None:
        path = self._path()
        if path is None:
            return
        same_as, size = self.headers.get("X-Same-As"), int(self.headers.get("Content-Length") or 0)
        try:
            if same_as is not None:
                there = replica_layout.link(path, replica_layout.path_of(path.parents[1], same_as, path.name))
                self._answer(201 if there else 404)
            else:
                replica_layout.write(path, size, self._body(size))
                self._answer(201)
        except GpuctlError:
            self._answer(404)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except OSError as error:
            # The rest of what they send is not read, so this connection is over.
            self.close_connection = True
            self._answer(507 if error.errno == errno.ENOSPC else 500)

    def _path(self) -> Path | None:
        """The path of the part that is asked for; ``None`` once a bad request was answered."""
        code = self.headers.get("Authorization", "").removeprefix(f"{replica_layout.SCHEME} ")
        self.asked += 1
        words = replica_layout.signed(self.command, self.path, dict(self.headers.items()))
        if self.session is None or not self.session.fits(code, "caller", self.asked, *words):
            self.close_connection = True
            self._answer(401)
            return None
        _, job, save, part = [*self.path.split("/", 3), "", "", ""][:4]
        if job == "environments" and self.archives and self.command == "GET" and _SHA256.fullmatch(save):
            return self.archives / f"{save}.tar.zst"
        try:
            if _JOB.fullmatch(job):
                return replica_layout.path_of(self.jobs / job / "tier", save, part)
        except GpuctlError:
            pass
        self.close_connection = True
        self._answer(404)
        return None

    def _meet(self) -> None:
        """Prove that this is the node that it seems to be, and have what to tell a caller by who knows the token."""
        theirs, own = self.headers.get("X-Nonce", ""), new_nonce()
        self.session = Session(self.token, theirs, own)
        self._answer(200, len(own), {"X-Code": self.session.code("listener")})
        with contextlib.suppress(OSError):
            self.wfile.write(own.encode())

    def _body(self, size: int) -> Iterator[bytes]:
        while size > 0:
            chunk = self.rfile.read(min(size, _CHUNK_BYTES))
            if not chunk:
                raise ConnectionResetError("cut off")
            size -= len(chunk)
            yield chunk

    def _answer(self, status: int, size: int = 0, headers: Mapping[str, str] | None = None) -> None:
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            self.send_header("Content-Length", str(size))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Nothing: who asked says so."""
