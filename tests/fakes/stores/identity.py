"""A machine's identity, which gives temporary keys of S3: EC2's metadata (IMDSv2), and what containers are given.

Source: Amazon EC2 user guide, "Retrieve security credentials from instance metadata"; EKS user guide, "EKS Pod
Identities". A web identity's keys come over TLS alone, so they are not here.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

_SESSION = "a session's token"

Kind = Literal["ec2", "container"]
KINDS: tuple[Kind, ...] = ("ec2", "container")


class Keys:
    """Gives a new key to whoever asks. A key lasts until ``expire``, whatever its holder was told: ``lasts_s``."""

    def __init__(self, lasts_s: float = 6 * 3600) -> None:
        self.lasts_s = lasts_s
        self.given: list[str] = []
        self._valid: set[str] = set()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def expire(self) -> None:
        """No key that was given so far is good any more."""
        with self._lock:
            self._valid.clear()

    def admits(self, authorization: str) -> bool:
        """Whether the request with this header (see ``faults.Proxy``) is signed with a key that is good."""
        found = re.search(r"Credential=(\w+)/", authorization)
        with self._lock:
            return found is not None and found[1] in self._valid

    def give(self) -> dict[str, str]:
        with self._lock:
            key = f"KEY{next(self._numbers)}"
            self.given.append(key)
            self._valid.add(key)
        until = datetime.now(UTC) + timedelta(seconds=self.lasts_s)
        return {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": key,
            "SecretAccessKey": f"secret of {key}",
            "Token": f"token of {key}",
            "Expiration": f"{until:%Y-%m-%dT%H:%M:%SZ}",
            "LastUpdated": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }


class Identity(Keys):
    """The service that gives them, where ``open_bucket`` finds it."""

    def __init__(self, lasts_s: float = 6 * 3600) -> None:
        super().__init__(lasts_s)
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Identity]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def env(self, kind: Kind, folder: Path) -> dict[str, str]:
        """What a process needs to find it. ``folder`` is for a file with a token."""
        if kind == "ec2":
            return {"AWS_METADATA_ENDPOINT": self.url}
        token = folder / "token"
        token.write_text(_SESSION)
        uri = f"{self.url}/v1/credentials"
        return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": uri, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token)}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        super().__init__(("127.0.0.1", 0), _Exchange)


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None: ...

    def exchange(self) -> None:
        answer = self._answer()
        self.send_response(401 if answer is None else 200)
        self.send_header("Content-Length", str(len(answer or "")))
        self.end_headers()
        self.wfile.write((answer or "").encode())

    do_GET = do_PUT = exchange  # noqa: N815 - the library's names

    def _answer(self) -> str | None:
        in_session = self.headers.get("X-aws-ec2-metadata-token") == _SESSION
        match self.command, self.path.rstrip("/"):
            case "PUT", "/latest/api/token" if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers:
                return _SESSION
            case "GET", "/latest/meta-data/iam/security-credentials" if in_session:
                return "node"
            case "GET", "/latest/meta-data/iam/security-credentials/node" if in_session:
                return json.dumps(self.server.identity.give())
            case "GET", "/v1/credentials" if self.headers.get("Authorization") == _SESSION:
                return json.dumps(self.server.identity.give())
        return None
