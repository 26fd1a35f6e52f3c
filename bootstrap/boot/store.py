"""The cluster's part of the bucket, with the standard library alone: get and put of small objects.

URLs are those of ``gpuctl.cluster.storage.bucket``. Of their options it knows ``region``, ``endpoint``, ``base_url``,
``account_name`` and, for tests, the keys that a query may carry; all others are for whoever opens the bucket later.

Sources: S3, "Authenticating Requests (AWS Signature Version 4)"; Cloud Storage, "XML API"; Azure, "Put Blob".
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from urllib.request import Request, urlopen

from .metadata import Credentials, Metadata
from .sigv4 import signed

_TRIES = 3
_TIMEOUT_S = 10
_BYTES = {"Content-Type": "application/octet-stream"}
"""Else urllib says that it is a form, and some servers take it for one."""
_BLOB = {**_BYTES, "x-ms-version": "2023-11-03", "x-ms-blob-type": "BlockBlob"}


class BootStore:
    """The bucket, with the standard library only. Raises ``OSError`` where the bucket refuses or does not answer."""

    def __init__(self, request: Callable[[str, str, bytes], Request]) -> None:
        self._request = request
        """Of a method, a key and a body; made anew for each try, since keys of roles expire."""

    def get(self, key: str) -> bytes:
        """Raises ``KeyError`` if there is none."""
        return self._ask("GET", key, b"")

    def put(self, key: str, data: bytes, tries: int = _TRIES) -> None:
        self._ask("PUT", key, data, tries)

    def _ask(self, method: str, key: str, body: bytes, tries: int = _TRIES) -> bytes:
        for left in reversed(range(tries)):
            try:
                with urlopen(self._request(method, key, body), timeout=_TIMEOUT_S) as answer:
                    return bytes(answer.read())
            except HTTPError as error:
                said = error.read(300).decode(errors="replace")
                if error.code == 404 and method == "GET":
                    raise KeyError(key) from error
                if not left or (error.code < 500 and error.code != 429):
                    raise OSError(f"{method} {key}: {error.code} {said}") from error
            except (OSError, HTTPException) as error:
                if not left:
                    raise OSError(f"{method} {key}: {error}") from error
            time.sleep(1)
        raise AssertionError


class FolderStore(BootStore):
    """A bucket that is a folder."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def get(self, key: str) -> bytes:
        try:
            return (self._path / key).read_bytes()
        except FileNotFoundError as error:
            raise KeyError(key) from error

    def put(self, key: str, data: bytes, tries: int = 1) -> None:  # noqa: ARG002 - there is nothing to try again
        path = self._path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(data)
        partial.replace(path)


def open_store(url: str, env: Mapping[str, str], metadata: Metadata | None) -> BootStore:
    """Open the bucket without a request. Keys come from the URL, ``env`` or ``metadata``. Raises ``ValueError``."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prefix = unquote(parts.path).strip("/")

    def at(base: str, key: str) -> str:
        return f"{base.rstrip('/')}/{parts.netloc}/{quote('/'.join(filter(None, (prefix, key))))}"

    def s3(method: str, key: str, body: bytes) -> Request:
        region = options.get("region") or env.get("AWS_REGION") or "us-east-1"
        whole = at(options.get("endpoint") or f"https://s3.{region}.amazonaws.com", key)
        return Request(whole, body or None, signed(method, whole, region, "s3", keys(), _BYTES, body), method=method)

    def keys() -> Credentials:
        if "access_key_id" in options:
            return Credentials(options["access_key_id"], options["secret_access_key"])
        if "AWS_ACCESS_KEY_ID" in env:
            secret, token = env["AWS_SECRET_ACCESS_KEY"], env.get("AWS_SESSION_TOKEN", "")
            return Credentials(env["AWS_ACCESS_KEY_ID"], secret, token)
        return _asked(metadata).aws_credentials()

    def gs(method: str, key: str, body: bytes) -> Request:
        token = options.get("bearer_token") or _asked(metadata).token("")
        whole = at(options.get("base_url") or "https://storage.googleapis.com", key)
        return Request(whole, body or None, {**_BYTES, "Authorization": f"Bearer {token}"}, method=method)

    def az(method: str, key: str, body: bytes) -> Request:
        base = options.get("endpoint") or f"https://{options['account_name']}.blob.core.windows.net"
        if "sas_key" in options:
            return Request(f"{at(base, key)}?{options['sas_key']}", body or None, _BLOB, method=method)
        token = _asked(metadata).token("https://storage.azure.com/")
        return Request(at(base, key), body or None, {**_BLOB, "Authorization": f"Bearer {token}"}, method=method)

    if parts.scheme == "file":
        return FolderStore(unquote(parts.path))
    if parts.scheme not in ("s3", "gs", "az"):
        raise ValueError(f"{parts.scheme}:// is not a bucket")
    return BootStore({"s3": s3, "gs": gs, "az": az}[parts.scheme])


def fetch(store: BootStore, key: str, digest: str, root: Path) -> Path:
    """The object, in a file of its own name. Raises ``OSError`` if there is none, or if its SHA-256 is another."""
    try:
        data = store.get(key)
    except KeyError as error:
        raise OSError(f"the bucket has no {key}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise OSError(f"{key} has the digest {found}, not {digest}")
    path = root / "opt/gpuctl" / key.rpartition("/")[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _asked(metadata: Metadata | None) -> Metadata:
    if metadata is None:
        raise OSError("no credentials for the bucket, and no metadata service to get them from")
    return metadata
