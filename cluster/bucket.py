"""The bucket: object storage of any kind behind five verbs, and the probe that refuses one that cannot decide.

URLs: ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``, ``file:///folder``, ``memory://`` (tests). Options
of the store follow as a query: ``s3://b/p?endpoint=http://127.0.0.1:9000&region=us-east-1`` (any key that obstore's store
takes). Credentials come from the environment or the machine's identity as for the vendor's own tools; a query may
carry them for tests, but a URL is shown on screens, so do not put secrets there.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import parse_qsl, urlsplit

from gpuctl.cluster.errors import BadInput, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file", "memory")


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed object."""

    key: str
    size: int
    tag: str
    """Changes when the content changes."""
    modified: float
    """Seconds since the epoch, by the store's clock."""


class Store(Protocol):
    """What agreement needs of object storage. ``create`` must let exactly one of many writers of a key win.

    Every verb raises ``StoreUnavailable`` when the answer did not come (a write may or may not have landed), and
    ``StoreError`` when the store refuses.
    """

    def get(self, key: str) -> bytes | None: ...

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """``get`` of each, in order; at the same time where that is quicker."""
        ...

    def put(self, key: str, data: bytes) -> None: ...

    def create(self, key: str, data: bytes) -> bool:
        """Write ``key`` if nobody has; ``False`` if it was there. After a lost answer, a retry inside the client may
        report ``False`` for a put of ours that landed: who must know reads the key back (``ledger`` does)."""
        ...

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        """The objects under folder ``prefix`` in key order, those past key ``after`` if given."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove what is there; a missing key is not an error."""
        ...


class Bucket:
    """A ``Store`` on obstore. ``url`` is what reopens it elsewhere (it is handed to nodes and workers)."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self.raw = store
        self.url = url

    def get(self, key: str) -> bytes | None:
        import obstore

        with _translated(self.url, key):
            try:
                return bytes(obstore.get(self.raw, key).bytes())
            except FileNotFoundError:
                return None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) < 2 or self.url.startswith("file:"):
            return [self.get(key) for key in keys]
        with ThreadPoolExecutor(min(len(keys), 32)) as pool:
            return list(pool.map(self.get, keys))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes ``[start, end)`` of an object that exists."""
        import obstore

        with _translated(self.url, key):
            return bytes(obstore.get_range(self.raw, key, start=start, end=end))

    def put(self, key: str, data: bytes) -> None:
        import obstore

        with _translated(self.url, key):
            obstore.put(self.raw, key, data)

    def create(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with _translated(self.url, key):
            try:
                obstore.put(self.raw, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        import obstore

        with _translated(self.url, prefix):
            found = [
                Entry(m["path"], m["size"], m["e_tag"] or "", m["last_modified"].timestamp())
                for batch in obstore.list(self.raw, prefix, offset=after)
                for m in batch
            ]
        # A local directory lists in no order, and not every store honours the offset.
        return sorted((e for e in found if after is None or e.key > after), key=lambda e: e.key)

    def delete(self, keys: Iterable[str]) -> None:
        import obstore

        for key in keys:
            with _translated(self.url, key), contextlib.suppress(FileNotFoundError):
                obstore.delete(self.raw, key)

    def at(self, prefix: str) -> Bucket:
        """The same bucket, seen from a folder below."""
        base, _, query = self.url.partition("?")
        return open_bucket(f"{base.rstrip('/')}/{prefix}" + (f"?{query}" if query else ""))


def open_bucket(url: str, *, patience_s: float = 10.0, timeout_s: float = 60.0) -> Bucket:
    """Open ``url`` without touching the network (a folder is created).

    ``timeout_s`` bounds one request, ``patience_s`` the retries of one call inside the client: an agent, which has
    other things to do and tries again itself, passes little of both.

    Raises ``BadInput`` for a URL that is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise BadInput(f"{url!r} is not a bucket URL", f"use one of {', '.join(s + '://' for s in SCHEMES[:-1])}")
    from obstore.store import LocalStore, MemoryStore, from_url

    if parts.scheme == "memory":
        return Bucket(MemoryStore(), url)
    if parts.scheme == "file":
        try:
            return Bucket(LocalStore(Path(parts.path), automatic_cleanup=False, mkdir=True), url)
        except Exception as error:
            raise StoreError(
                f"cannot open the folder {parts.path}: {_first_line(error)}", "choose another --bucket"
            ) from error
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=3), "timeout": timedelta(seconds=timeout_s)}
    if options.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True
    retry: Any = {
        "max_retries": 5,
        "retry_timeout": timedelta(seconds=patience_s),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    try:
        store = cast(Any, from_url)(
            f"{parts.scheme}://{parts.netloc}{parts.path}",
            config=options,
            client_options=client,
            retry_config=retry,
        )
    except Exception as error:
        raise BadInput(
            f"cannot open the bucket {url!r}: {_first_line(error)}", "check the URL and its options"
        ) from error
    return Bucket(store, url)


def probe(store: Store) -> None:
    """Refuse a store whose create-only put lets a second writer win: every agreement here rests on it.

    Measured: AWS S3, GCS, Azure, MinIO and moto honour it; ``rclone serve s3`` lets all writers win.

    Raises ``StoreError``.
    """
    key = f"probe/{uuid.uuid4().hex}"
    try:
        first, second = store.create(key, b"first"), store.create(key, b"second")
        if not first or second or store.get(key) != b"first":
            raise StoreError(
                "this bucket ignores create-only puts (If-None-Match: *), so two nodes could both win an election",
                "use a store that honours them: S3, GCS, Azure Blob, MinIO, or a local folder",
            )
    finally:
        with contextlib.suppress(StoreError, StoreUnavailable):
            store.delete([key])


@contextlib.contextmanager
def _translated(url: str, key: str) -> Iterator[None]:
    """obstore's errors in our words; a missing object passes as ``FileNotFoundError``."""
    import obstore.exceptions as e

    try:
        yield
    except (FileNotFoundError, e.AlreadyExistsError, e.PreconditionError):
        raise
    except (e.PermissionDeniedError, e.UnauthenticatedError, PermissionError) as error:
        raise StoreError(
            f"the bucket {url} refuses {key!r}: {_first_line(error)}", "check its credentials and its policy"
        ) from error
    except (e.BaseError, OSError) as error:
        text = str(error)
        if any(
            sign in text
            for sign in (
                "NoSuchBucket",
                "AccessDenied",
                "PermissionDenied",
                "Permission denied",
                "Read-only file system",
            )
        ):
            raise StoreError(
                f"the bucket {url} refuses {key!r}: {_first_line(error)}", "check that it exists and may be written"
            ) from error
        raise StoreUnavailable(
            f"the bucket {url} did not answer for {key!r}: {_first_line(error)}", "try again"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
