"""A project of Google Cloud on loopback: a server that answers as Google does, with what a test has put there, to the
real clients. Answers have the shapes of Google's REST reference: Compute Engine v1, IAM v1, Resource Manager v1 and v3,
Cloud Billing v1, Cloud Storage v1's list of buckets, and the token endpoint of OAuth.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

PROJECT = "a-project"
EMAIL = f"me@{PROJECT}.iam.gserviceaccount.com"
COMPUTE = f"/compute/v1/projects/{PROJECT}"
URL = f"https://www.googleapis.com{COMPUTE}"
"""What Google calls its own things by, wherever it is asked."""
ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a")


class Asked(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]
    """By their names in small letters."""


@dataclass
class Google:
    """``answers`` by method and path: one, several as pages of a list, a status with one, or what makes one of the
    body that was sent."""

    endpoint: str
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    held: Callable[[Asked], tuple[int, Any] | None] = lambda _: None
    """Is asked first, and tells nothing of what it does not hold (see ``google_held``)."""

    def put(self, what: str, answer: Any) -> None:
        """At a path of Compute Engine, such as ``zones/us-central1-a/…``, or at one that begins with a ``/``."""
        method, _, path = what.rpartition(" ")
        self.answers[f"{method or 'GET'} {path if path.startswith('/') else f'{COMPUTE}/{path}'}"] = answer

    def put_everywhere(self, collection: str, *pages: dict[str, Sequence[Any]]) -> None:
        """What an aggregated list tells: things by place, page by page. All other places have none of it."""
        self.put(f"aggregated/{collection}", [{"items": _by_place(collection, page)} for page in pages])

    def requests(self, path: str) -> list[Asked]:
        """Those to paths that end so."""
        return [one for one in self.asked if one.path.endswith(path)]

    def answer(self, one: Asked) -> tuple[int, Any]:
        if one.path == "/token":
            return _status(self.answers.get("POST /token", {"access_token": "t", "expires_in": 3600}))
        if (told := self.held(one)) is not None:
            return told
        answer = self.answers.get(f"{one.method} {one.path}")
        if answer is None:
            return refusal(404, f"The resource '{one.path.removeprefix('/compute/v1/')}' was not found", "notFound")
        if callable(answer):
            return _status(answer(one.body))
        if "parent" in one.query and isinstance(answer, dict):
            answer = answer.get(one.query["parent"], answer)
        if not isinstance(answer, list):
            return _status(answer)
        page = int(one.query.get("pageToken", "0"))
        more = {"nextPageToken": str(page + 1)} if page + 1 < len(answer) else {}
        return 200, {**answer[page], **more}


def refusal(status: int, message: str, reason: str = "forbidden") -> tuple[int, Any]:
    """As Compute Engine refuses."""
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return status, {"error": {"code": status, "message": message, "errors": errors}}


def status_refusal(status: int, message: str, name: str) -> tuple[int, Any]:
    """As Google's newer services refuse what they have no more to say of; ``name``: such as ``ABORTED``."""
    return status, {"error": {"code": status, "message": message, "status": name}}


def typed_refusal(status: int, message: str, reason: str, **metadata: str) -> tuple[int, Any]:
    """As Google's newer services refuse: IAM, Resource Manager, billing."""
    kind = "type.googleapis.com/google.rpc.ErrorInfo"
    details = [{"@type": kind, "reason": reason, "domain": "googleapis.com", "metadata": metadata}]
    error = {"code": status, "message": message, "status": "PERMISSION_DENIED", "details": details}
    return status, {"error": error}


def _status(answer: Any) -> tuple[int, Any]:
    return answer if isinstance(answer, tuple) else (200, answer)


def _by_place(collection: str, things: dict[str, Sequence[Any]]) -> dict[str, Any]:
    empty = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results for scope"}}
    return {f"zones/{ZONES[-1]}": empty} | {place: {collection: list(some)} for place, some in things.items()}


@contextmanager
def serving() -> Iterator[Google]:
    """An empty project with its regions. Ports are the kernel's choice."""

    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None: ...

        def exchange(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(url.query).items()}
            body = json.loads(raw) if raw.startswith(b"{") else raw.decode()
            asked = Asked(
                self.command, url.path, query, body, {name.lower(): value for name, value in self.headers.items()}
            )
            google.asked.append(asked)
            status, answer = google.answer(asked)
            told = b"" if status == 204 else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = exchange  # noqa: N815 - the library's names

    server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
    server.daemon_threads = True
    google = Google(f"http://127.0.0.1:{server.server_address[1]}")
    _furnish(google)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield google
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _furnish(google: Google) -> None:
    regions = [
        {
            "name": name,
            "status": "UP",
            "zones": [f"{URL}/zones/{zone}" for zone in ZONES if zone.startswith(name)],
        }
        for name in ("europe-west4", "us-central1")
    ]
    google.put("regions", {"items": regions})
    for region in regions:
        google.put(f"regions/{region['name']}", region)
    for collection in (
        *("instances", "disks", "addresses", "forwardingRules", "instanceTemplates", "instanceGroupManagers"),
        *("resourcePolicies", "routers", "subnetworks"),
    ):
        google.put_everywhere(collection, {})
    for collection in ("firewalls", "networks"):
        google.put(f"global/{collection}", {})
    google.put(f"/v1/projects/{PROJECT}/serviceAccounts", {})
    google.put(f"/v1/projects/{PROJECT}/roles", {})
    google.put(f"POST /v1/projects/{PROJECT}:getIamPolicy", {"version": 3, "bindings": []})
    google.put("/v3/tagKeys", {})
    google.put("/storage/v1/b", {})


def credentials_file(folder: Path, endpoint: str) -> Path:
    """Of a service account whose tokens come from the server."""
    path = folder / "credentials.json"
    told = {
        "type": "service_account",
        "project_id": PROJECT,
        "private_key_id": "1",
        "private_key": _private_key(),
        "client_email": EMAIL,
        "client_id": "1",
        "token_uri": f"{endpoint}/token",
    }
    path.write_text(json.dumps(told))
    return path


@cache
def _private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    as_text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return as_text.decode()


def environment(google: Google, folder: Path) -> dict[str, str]:
    """In which Google's clients and gpuctl find the server, and nothing of whoever runs this."""
    services = ("COMPUTE", "IAM", "CLOUDRESOURCEMANAGER", "CLOUDBILLING", "STORAGE")
    return {
        **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": google.endpoint for name in services},
        "GOOGLE_APPLICATION_CREDENTIALS": str(credentials_file(folder, google.endpoint)),
        "CLOUDSDK_CONFIG": str(folder / "none"),
        "NO_GCE_CHECK": "true",
        # google-auth looks up a service account's regions besides, at an address that nothing changes.
        **dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9"),
    }


def matches(pattern: re.Pattern[str], text: str) -> str:
    """The cluster that ``pattern`` reads from ``text``."""
    found = pattern.fullmatch(text)
    assert found, f"{text!r} is not {pattern.pattern!r}"
    return found[1]
