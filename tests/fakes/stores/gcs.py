"""Google Cloud Storage: a server of our own for the part of its XML API that obstore speaks.

The emulators that can be had as packages ignore ``x-goog-if-generation-match``, and all writers of a create-only put
win there. Errors are worded as Google words them.

Source: cloud.google.com/storage/docs/xml-api, "Reference methods" and "HTTP status and error codes for XML".
"""

from __future__ import annotations

import base64
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.fakes.stores.objects import Buckets, Object, Refusal
from tests.fakes.stores.serving import started

_TOKEN = "test"


@contextmanager
def serving(journal: Path | None = None, port: int = 0) -> Iterator[str]:
    """Yields the server's URL. With a ``journal`` it begins with what an earlier one had that wrote it."""
    with started([sys.executable, "-m", "tests.fakes.stores.gcs", str(port), str(journal or "")], r"^(\d+)$") as bound:
        yield f"http://127.0.0.1:{bound}"


def create(endpoint: str, bucket: str) -> None:
    _ask("PUT", f"{endpoint}/{bucket}", b"")


def delete(endpoint: str, bucket: str, key: str = "") -> None:
    """An object, or without a key the bucket, which must be empty."""
    _ask("DELETE", f"{endpoint}/{bucket}{f'/{quote(key)}' if key else ''}")


def generations(endpoint: str, bucket: str) -> dict[str, int]:
    """Of all that is in it, by key."""
    found: dict[str, int] = {}
    token: str | None = ""
    while token is not None:
        page = ElementTree.fromstring(
            _ask("GET", f"{endpoint}/{bucket}?list-type=2&continuation-token={quote(token, safe='')}")
        )
        found |= {one.findtext("Key", ""): int(one.findtext("Generation", "0")) for one in page.findall("Contents")}
        token = page.findtext("NextContinuationToken")
    return found


def _ask(method: str, url: str, body: bytes | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {_TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=30) as answer:
        return bytes(answer.read())


def url(endpoint: str, bucket: str, secret: str = _TOKEN) -> str:
    """What ``open_bucket`` takes for a prefix in ``bucket``."""
    return f"gs://{bucket}/prefix?base_url={endpoint}&bearer_token={quote(secret, safe='')}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, journal: str) -> None:
        self.buckets = Buckets(Path(journal) if journal else None)
        super().__init__(("127.0.0.1", port), _Exchange)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that gave up
            super().handle_error(request, client_address)


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: Any) -> None: ...

    def exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            self._obey(body)
        except Refusal as refusal:
            told = f"<Error><Code>{refusal.code}</Code><Message>{refusal.message}</Message></Error>"
            self._answer(refusal.status, told)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = exchange  # noqa: N815 - the library's names

    def _obey(self, body: bytes) -> None:
        if self.headers.get("Authorization") != f"Bearer {_TOKEN}":
            raise Refusal(401, "AuthenticationRequired", "Authentication required.")
        path, query = urlsplit(self.path)[2:4]
        bucket, _, key = (unquote(part) for part in path.lstrip("/").partition("/"))
        options = dict(parse_qsl(query, keep_blank_values=True))
        if not key:
            self._of_bucket(bucket, options)
        elif "uploads" in options or "uploadId" in options:
            self._of_upload(bucket, key, options, body)
        else:
            self._of_object(bucket, key, body)

    def _of_bucket(self, bucket: str, options: dict[str, str]) -> None:
        match self.command:
            case "PUT":
                self.server.buckets.create(bucket)
                self._answer()
            case "DELETE":
                self.server.buckets.drop(bucket)
                self._answer(204)
            case "GET" if options.get("list-type") == "2":
                self._answer(body=self._listing(bucket, options))
            case _:
                raise _unknown()

    def _of_object(self, bucket: str, key: str, body: bytes) -> None:
        match self.command:
            case "PUT":
                condition = self.headers.get("x-goog-if-generation-match")
                generation = int(condition) if condition is not None else None
                self._answer(there=self.server.buckets.write(bucket, key, body, generation))
            case "GET" | "HEAD":
                self._content(self.server.buckets.read(bucket, key))
            case "DELETE":
                self.server.buckets.remove(bucket, key)
                self._answer(204)
            case _:
                raise _unknown()

    def _of_upload(self, bucket: str, key: str, options: dict[str, str], body: bytes) -> None:
        buckets, upload = self.server.buckets, options.get("uploadId", "")
        match self.command:
            case "POST" if "uploads" in options:
                names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{buckets.begin(bucket)}</UploadId>"
                self._answer(body=f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>")
            case "PUT":
                self._answer(there=buckets.add(upload, int(options["partNumber"]), body))
            case "POST":
                parts = ElementTree.fromstring(body).findall("{*}Part")
                wanted = [(int(p.findtext("{*}PartNumber", "0")), p.findtext("{*}ETag", "")) for p in parts]
                whole = buckets.finish(bucket, key, upload, wanted)
                told = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>{escape(whole.tag)}</ETag>"
                told = f"<CompleteMultipartUploadResult>{told}</CompleteMultipartUploadResult>"
                self._answer(body=told, there=whole)
            case "DELETE":
                buckets.abort(upload)
                self._answer(204)
            case _:
                raise _unknown()

    def _listing(self, bucket: str, options: dict[str, str]) -> str:
        prefix, token = options.get("prefix", ""), options.get("continuation-token", "")
        after = base64.b64decode(token).decode() if token else options.get("start-after", "")
        page = self.server.buckets.page(bucket, prefix, options.get("delimiter", ""), after)
        told = [f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page.names)}</KeyCount>"]
        told.append(f"<IsTruncated>{str(page.last is not None).lower()}</IsTruncated>")
        if page.last is not None:
            told.append(
                f"<NextContinuationToken>{base64.b64encode(page.last.encode()).decode()}</NextContinuationToken>"
            )
        for name, there in page.names.items():
            if there is None:
                told.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            told.append(f"<Contents><Key>{escape(name)}</Key><Generation>{there.generation}</Generation>")
            told.append(f"<LastModified>{there.modified:%Y-%m-%dT%H:%M:%S.%fZ}</LastModified>")
            told.append(f"<ETag>{escape(there.tag)}</ETag><Size>{len(there.data)}</Size></Contents>")
        return f"<ListBucketResult>{''.join(told)}</ListBucketResult>"

    def _content(self, there: Object) -> None:
        """The object, or the range of it that is asked for: ``bytes=2-5``, ``bytes=2-`` or ``bytes=-5``."""
        size = len(there.data)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(body=there.data, there=there)
            return
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if start >= end:
            raise Refusal(416, "InvalidRange", "The requested range cannot be satisfied.")
        self._answer(206, there.data[start:end], there, {"Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def _answer(
        self,
        status: int = 200,
        body: str | bytes = b"",
        there: Object | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        if there is not None:
            self.send_header("ETag", there.tag)
            self.send_header("x-goog-generation", str(there.generation))
            self.send_header("Last-Modified", format_datetime(there.modified, usegmt=True))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header(
            "Content-Type", "application/xml; charset=UTF-8" if isinstance(body, str) else "binary/octet-stream"
        )
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _unknown() -> Refusal:
    return Refusal(501, "NotImplemented", "The requested functionality is not implemented.")


if __name__ == "__main__":
    server = _Server(int(sys.argv[1]), sys.argv[2])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
