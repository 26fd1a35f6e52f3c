"""Blob storage of all accounts of a subscription (``azure_cloud``), as it looks from outside: an account is there once
somebody has made it, its keys are of no use, and who reads and writes is who was given the role, as soon as the storage
has heard of that.

The objects are Azurite's, which knows one account only, and takes no tokens without TLS.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.azure.cloud import Subscription
from tests.fakes.pulumi.resources_azure import USER
from tests.fakes.stores import azurite

TOKEN = "a-token-for-storage"
DATA_CONTRIBUTOR = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"
NOT_YET = 2
"""Writes that are refused before the storage has heard of a role: Azure takes up to ten minutes."""


@contextmanager
def serving(azurite_endpoint: str, there: Subscription) -> Iterator[str]:
    """Yields the URL that an account's name is to be added to."""
    real = urlsplit(azurite_endpoint)
    refused: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            _, account, container, *_ = f"{url.path}//".split("/")
            if there.storage(account) is None:
                self.close_connection = True  # no such host, it would be
                return
            id_ = there.storage(account, container)
            if id_ is None:
                self._refuse(404, "ContainerNotFound", "The specified container does not exist.")
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._refuse(401, "InvalidAuthenticationInfo", "Server failed to authenticate the request.")
            elif not self._may(id_):
                told = "This request is not authorized to perform this operation using this permission."
                self._refuse(403, "AuthorizationPermissionMismatch", told)
            else:
                self._answer(*self._theirs(f"{account}-{container}", body))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

        def _may(self, id_: str) -> bool:
            if not there.may(USER, id_, DATA_CONTRIBUTOR):
                return False
            refused[id_] = refused.get(id_, 0) + (self.command == "PUT")
            return refused[id_] > NOT_YET

        def _theirs(self, name: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            url = urlsplit(self.path)
            key = parse_qs(urlsplit(azurite.shared_url(azurite_endpoint, name, "racwdl")).query)["sas_key"][0]
            below = "/".join(url.path.split("/")[3:])
            if self.command == "POST":  # requests within a request
                whole = re.sub(r"DELETE (/[^/]+){2}/(\S+)", rf"DELETE {real.path}/{name}/\2?{key}", body.decode())
                body = re.sub(r"Authorization: .*\r\n", "", whole).encode()
            path = f"{real.path}/{name}{f'/{below}' if below else ''}?{url.query}{'&' if url.query else ''}{key}"
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OURS}
            connection = http.client.HTTPConnection(real.netloc, timeout=30)
            connection.request(self.command, path, body or None, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            found = answer.status, answer.read(), dict(answer.getheaders())
            connection.close()
            return found

        def _refuse(self, status: int, code: str, message: str) -> None:
            text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
            self._answer(status, text.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml"})

        def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in _OURS:
                    self.send_header(name, value)
            head = self.command == "HEAD"
            self.send_header("Content-Length", headers.get("Content-Length", "0") if head else str(len(data)))
            self.end_headers()
            if not head:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None: ...  # somebody has hung up

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_OURS = ("authorization", "connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding")
"""Headers of one connection, which are not passed on."""
