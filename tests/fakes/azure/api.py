"""Azure's REST API on loopback: it answers what ``arm/*.json`` have, by path, in the shapes that Azure's own reference
gives (learn.microsoft.com/rest/api). Real clients read them, over real connections.

It pages every list after two things, as Azure pages them after many; knows its token; and complains of a path that
nobody has recorded, so that a call which a test did not think of is no silent "nothing there". What changes while it is
looked at is somebody else's (``azure_cloud``).
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from azure.core.credentials import AccessToken

from gpuctl.stacks.clouds.azure.client import AzureAccount, connecting
from tests.fakes.pulumi.resources_azure import USER

SUBSCRIPTION = "00000000-0000-0000-0000-000000000000"
_CLAIMS = {"oid": USER, "scp": "user_impersonation"}
TOKEN = f"e30.{base64.urlsafe_b64encode(json.dumps(_CLAIMS).encode()).decode().rstrip('=')}.signature"
"""Of a person who is logged in: learn.microsoft.com, "Access token claims reference"."""
_PAGE = 2
_RECORDED = Path(__file__).with_name("arm")

Answers = dict[str, Any]
"""Body, or ``[status, body]``, perhaps with headers, in which ``$URL`` is the server's, by path below the subscription
or from the root. A list of things becomes a ``value``
in pages; of one that Azure does not page, name the status."""
Refusal = list[Any]


def recorded(name: str) -> Answers:
    """``arm/NAME.json``; in it ``$S`` is the subscription's path."""
    text = (_RECORDED / f"{name}.json").read_text().replace("$S", f"/subscriptions/{SUBSCRIPTION}")
    answers: Answers = json.loads(text)
    return answers


def refusal(code: str, message: str = "no", status: int = 403) -> Refusal:
    return [status, {"error": {"code": code, "message": message}}]


def forbidden(action: str) -> Refusal:
    """As Azure words it."""
    said = f"The client 'me' with object id 'me' does not have authorization to perform action '{action}' over scope"
    return refusal("AuthorizationFailed", f"{said} '/subscriptions/{SUBSCRIPTION}' or the scope is invalid.")


@dataclass
class Api:
    """``asked``: method, path with query, and body of each request."""

    url: str
    answers: Answers
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    by_method: dict[str, Refusal] = field(default_factory=dict)
    """Status and body for a method, such as ``PATCH``, whatever there is at the path."""
    live: Callable[[str, str, Any], Any] = lambda *_: None
    """Answers what is not recorded, by method, path with query, and body; ``None``: it does not either."""

    def account(self, token: str = TOKEN) -> AzureAccount:
        return connecting(SUBSCRIPTION, Static(token), self.url)

    def queries(self, path: str) -> list[dict[str, str]]:
        """Of the requests to a path below the subscription."""
        whole = f"/subscriptions/{SUBSCRIPTION}/{path}".lower()
        found = [urlsplit(asked) for _, asked, _ in self.asked]
        return [{k: v[0] for k, v in parse_qs(one.query).items()} for one in found if one.path.lower() == whole]


@dataclass
class Static:
    """A credential that has its token already."""

    token: str

    def get_token(self, *_: str, **__: Any) -> AccessToken:
        return AccessToken(self.token, 2**33)


@contextmanager
def serving(answers: Mapping[str, Any], live: Callable[[str, str, Any], Any] = lambda *_: None) -> Iterator[Api]:
    server = _Server(("127.0.0.1", 0), _Handler)
    recorded_ones = {path.lower(): body for path, body in answers.items()}
    api = Api(f"http://127.0.0.1:{server.server_port}", recorded_ones, live=live)
    server.api = api  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # a scan asks for many things at once


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(None)

    def do_DELETE(self) -> None:
        self._reply(None)

    def do_PATCH(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    do_PUT = do_PATCH  # noqa: N815

    def _reply(self, sent: Any) -> None:
        api: Api = self.server.api  # type: ignore[attr-defined]
        api.asked.append((self.command, self.path, sent))
        status, body, *headers = self._answer(api, sent)
        text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if isinstance(body, str) else "application/json; charset=utf-8")
        self.send_header("Content-Length", "0" if status == 204 else str(len(text)))
        for name, value in (headers[0] if headers else {}).items():
            self.send_header(name, value.replace("$URL", api.url))
        self.end_headers()
        if status != 204:
            self.wfile.write(text)

    def _answer(self, api: Api, sent: Any) -> Any:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, refusal("InvalidAuthenticationToken", "The access token is invalid.")[1]
        url = urlsplit(self.path)
        path = url.path.lower()
        below = path.removeprefix(f"/subscriptions/{SUBSCRIPTION}").lstrip("/")
        answer: Any = api.by_method.get(self.command) or api.answers.get(below, api.answers.get(path))
        if answer is None:
            answer = api.live(self.command, self.path, sent)
        if answer is None:
            return 400, refusal("NotRecorded", f"nobody has recorded {self.command} {url.path}")[1]
        if isinstance(answer, list) and answer[:1] and isinstance(answer[0], int):
            return answer
        if not isinstance(answer, list):
            return 200, answer
        begin = int(parse_qs(url.query).get("$skiptoken", ["0"])[0])
        page: dict[str, Any] = {"value": answer[begin : begin + _PAGE]}
        if begin + _PAGE < len(answer):
            page["nextLink"] = f"{api.url}{url.path}?api-version=1&$skiptoken={begin + _PAGE}"
        return 200, page

    def log_message(self, *_: object) -> None:
        pass


# -- the user's own tools ---------------------------------------------------------------------------------------------

_LOGGED_IN = f"""echo '{{"accessToken": "{TOKEN}", "expires_on": 32503680000, "tokenType": "Bearer"}}'"""
_LOGGED_OUT = """echo "ERROR: Please run 'az login' to setup account." >&2; exit 1"""
_EXPIRED = """echo "ERROR: AADSTS700082: The refresh token has expired due to inactivity." >&2; exit 1"""
AZ = {"logged in": _LOGGED_IN, "logged out": _LOGGED_OUT, "expired": _EXPIRED}
"""What ``az account get-access-token`` does, as a line of shell."""


def environment(folder: Path, api: Api | None = None, az: str = "logged in") -> dict[str, str]:
    """For a ``gpuctl`` of its own: an ``az`` in ``folder`` that is in the state ``az``, the only way to log in that is
    tried, and Azure at ``api``."""
    tool = folder / "az"
    tool.write_text(f"#!/bin/sh\n{AZ[az]}\n")
    tool.chmod(0o755)
    (folder / "azureProfile.json").write_text(
        json.dumps({"subscriptions": [{"id": "other"}, {"id": SUBSCRIPTION, "isDefault": True}]}), "utf-8-sig"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ARM_")}
    return {
        **inherited,
        "PATH": f"{folder}:/usr/bin:/bin",
        "AZURE_CONFIG_DIR": str(folder),
        "AZURE_TOKEN_CREDENTIALS": "AzureCliCredential",
        "ARM_ENDPOINT": api.url if api else "http://127.0.0.1:9",
    }


def gpuctl(env: Mapping[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuctl.cli.main", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
