"""The bucket: object storage of any kind behind six verbs, and the probe that refuses one that cannot decide.

URLs: ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``, ``file:///folder`` (absolute; what ``Path.as_uri``
writes), ``memory://`` (tests; gone with the object that opened it). Options follow as a query, any that obstore's store
or its HTTP client takes (see ``store_options``): ``s3://b/p?endpoint=http://127.0.0.1:9000&region=us-east-1``. Where
``s3`` and ``az`` have ``endpoint``, ``gs`` has ``base_url``; without TLS if it begins with ``http://``.

Credentials come from the environment or the machine's identity (``session`` renews them). Profiles in ``~/.aws`` are
not read. A query may carry credentials for tests: messages leave the query out, but the URL is handed to nodes and
workers as it is.

A process that was forked from one that has used a bucket cannot use any: obstore's threads did not come along, and it
would wait for them forever. That is refused with a ``StoreError``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote

from gpuctl.cluster.errors import BadInput, StoreError
from gpuctl.cluster.storage.bucket_names import ENDPOINTS, folder_of, parts_of
from gpuctl.cluster.storage.credentials import of_this_user
from gpuctl.cluster.storage.error_mapping import conflicts, first_line, is_garbled, is_no_bucket, is_past_the_end, shown
from gpuctl.cluster.storage.session import StoreSession
from gpuctl.cluster.storage.store_options import check_environment, sort_out

if TYPE_CHECKING:
    from obstore.store import ObjectStore
from gpuctl.cluster.storage.interface import Entry

T = TypeVar("T")
_PUT_PAUSES_S = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Between puts of one key while the store's answer decides nothing."""
_PIECE_BYTES = 128 << 10
"""Least size of a streamed piece: each is some 20 us of Python, and should be in the processor's cache still."""
_DELETED_AT_ONCE = 1000
"""Keys in one call of obstore, and in one request to S3, which takes no more."""
_HOPE = 5
"""So many times a call's patience may pass until expired credentials are a refusal."""


class Bucket:
    """A ``Store`` on obstore. ``url`` is what reopens it elsewhere (it is handed to nodes and workers).

    Threads may share one.
    """

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        *,
        patience_s: float = 10.0,
        timeout_s: float = 60.0,
        reopen: Callable[[], ObjectStore] | None = None,
    ) -> None:
        self.url = url
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._access = StoreSession(store, url, reopen, _HOPE * patience_s)

    @property
    def raw(self) -> ObjectStore:
        """obstore's store as it is now: another one once credentials were renewed."""
        return self._access.store

    def ask(self, key: str, call: Callable[[ObjectStore], T]) -> T:
        """What ``call`` makes of ``raw`` in requests about ``key``, for what the verbs below are not enough. It may be
        called twice. Raises what they do."""
        return self._access.ask(key, call)

    def get(self, key: str) -> bytes | None:
        import obstore

        def get(store: ObjectStore) -> bytes | None:
            try:
                return bytes(obstore.get(store, key).bytes())
            except FileNotFoundError as error:
                if is_no_bucket(error):
                    raise
                return None

        return self.ask(key, get)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) < 2 or self.url.startswith("file:"):
            return [self.get(key) for key in keys]
        with ThreadPoolExecutor(min(len(keys), 32)) as pool:
            return list(pool.map(self.get, keys))

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Bytes ``[start, end)`` of an object, fewer if it ends before; ``FileNotFoundError`` if there is none."""
        import obstore

        found = self._ranged(key, lambda store: memoryview(obstore.get_range(store, key, start=start, end=end)))
        return memoryview(b"") if found is None else found

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """What ``get_range`` returns, in pieces as they arrive: they are still in the processor's cache then, and the
        whole of them is nowhere in memory."""
        import obstore

        at = start
        # Of a file, obstore's pieces are put together from 8 KiB each.
        if not self.url.startswith(("file:", "memory:")):
            found = self._ranged(key, lambda store: obstore.get(store, key, options={"range": (start, end)}))
            if found is None:
                return
            try:
                for piece in found.stream(min_chunk_size=_PIECE_BYTES):
                    yield memoryview(piece)
                    at += len(piece)
                return
            except (obstore.exceptions.BaseError, OSError):
                pass  # a connection that broke, and whatever the client has tried: what is left is asked for anew
        yield self.get_range(key, at, end)

    def _ranged(self, key: str, call: Callable[[ObjectStore], T]) -> T | None:
        """What ``call`` returns, which asks for a range; ``None`` if the object ends before that. Raises
        ``FileNotFoundError`` if there is no object."""
        import obstore

        def get(store: ObjectStore) -> T | FileNotFoundError | None:
            try:
                return call(store)
            except FileNotFoundError as error:
                if is_no_bucket(error):
                    raise
                return error
            except obstore.exceptions.BaseError as error:
                if is_past_the_end(error):
                    return None
                raise

        found = self.ask(key, get)
        if isinstance(found, FileNotFoundError):
            raise found
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object in one request, of up to 5 GB. Nothing is copied, and nothing unfinished is left behind."""
        self.ask(key, lambda store: _put(store, key, data, "overwrite"))

    def create(self, key: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def create(store: ObjectStore) -> bool:
            try:
                _put(store, key, data, "create")
                return True
            except (AlreadyExistsError, PreconditionError) as error:
                if is_no_bucket(error) or conflicts(error):
                    raise
                return False

        return self.ask(key, create)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        import obstore

        def listed(store: ObjectStore) -> list[Entry]:
            return [
                Entry(m["path"], m["size"], m["e_tag"] or "", m["last_modified"].timestamp())
                for batch in obstore.list(store, prefix, offset=after)
                for m in batch
            ]

        # A local directory lists in no order, and not every store honours the offset.
        found = self.ask(prefix, listed)
        return sorted((e for e in found if after is None or e.key > after), key=lambda e: e.key)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, in no order and many at a time: S3 and Azure take a list in one request. If it raises, some
        may be gone."""
        waiting = list(keys)
        for first in range(0, len(waiting), _DELETED_AT_ONCE):
            some = waiting[first : first + _DELETED_AT_ONCE]
            if self._delete(some) or len(some) == 1:
                continue
            # All but S3 stop at one that is missing, whatever is left of the others.
            with ThreadPoolExecutor(min(len(some), 32)) as pool:
                list(pool.map(self._delete, ([key] for key in some)))

    def _delete(self, keys: Sequence[str]) -> bool:
        """Whether all were there, as far as the store tells; if not, it may have left some that are."""
        import obstore

        def delete(store: ObjectStore) -> bool:
            try:
                obstore.delete(store, keys)
                return True
            except FileNotFoundError as error:
                if is_no_bucket(error):
                    raise
                return False

        return self.ask(keys[0], delete)

    def at(self, prefix: str) -> Bucket:
        """The same bucket, with the same patience, seen from a folder below. Raises ``BadInput`` for ``memory://``."""
        base, _, query = self.url.partition("?")
        if base.startswith("memory:"):
            raise BadInput("a memory:// bucket cannot be opened twice", "use a file:// bucket in a temporary folder")
        url = f"{base.rstrip('/')}/{quote(prefix)}" + (f"?{query}" if query else "")
        if base.startswith("file:"):
            return _open_folder(url, 0o777)  # whoever may enter the bucket, may enter what is in it
        return open_bucket(url, patience_s=self._patience_s, timeout_s=self._timeout_s)


def open_bucket(url: str, *, patience_s: float = 10.0, timeout_s: float = 60.0) -> Bucket:
    """Open ``url`` without touching the network. A folder that is not there is created, for this user alone.

    ``timeout_s`` bounds one request, ``patience_s`` the retries of one call inside the client: an agent, which has
    other things to do and tries again itself, passes little of both.

    Raises ``BadInput`` for a URL that is none.
    """
    parts = parts_of(url)
    url = parts.scheme + url[len(parts.scheme) :]  # S3:// is s3:// to all who look at it
    if not re.fullmatch(r"[ -~]*", unquote(parts.query)):  # obstore would panic
        raise BadInput(f"an option of {shown(url)!r} has a character that is not allowed in a header", "type it again")
    from obstore.store import MemoryStore, from_url

    if parts.scheme == "memory":
        return Bucket(MemoryStore(), url)
    if parts.scheme == "file":
        return _open_folder(url, 0o700)  # scripts' secrets are in it
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=3), "timeout": timedelta(seconds=timeout_s)}
    retry: Any = {
        "max_retries": 1000,  # patience alone decides
        "retry_timeout": timedelta(seconds=patience_s),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=2), "base": 2},
    }

    def opened() -> ObjectStore:
        theirs = of_this_user(parts.scheme, options)
        return cast(
            "ObjectStore",
            cast(Any, from_url)(
                f"{parts.scheme}://{parts.netloc}{parts.path}",
                config={**theirs.pop("config", {}), **options},
                client_options=client,
                retry_config=retry,
                **theirs,
            ),
        )

    try:
        check_environment(parts.scheme, os.environ)
    except ValueError as error:
        raise BadInput(f"cannot open the bucket {shown(url)!r}: {error}", "correct the variable, or unset it") from None
    try:
        given = parse_qsl(parts.query, strict_parsing=True, keep_blank_values=True) if parts.query else []
        options, of_client = sort_out(parts.scheme, given)
        told = [*options.values(), *(os.environ.get(name, "") for name in ENDPOINTS)]
        if any(value.startswith("http://") for value in told):  # whatever the store calls its endpoint
            client["allow_http"] = True
        client |= of_client
        store = opened()
    except Exception as error:
        raise BadInput(
            f"cannot open the bucket {shown(url)!r}: {first_line(str(error))}", "check the URL and its options"
        ) from error
    return Bucket(store, url, patience_s=patience_s, timeout_s=timeout_s, reopen=opened)


def _open_folder(url: str, mode: int) -> Bucket:
    """``mode`` is what a new one gets; one that is there stays as its owner has made it."""
    from obstore.store import LocalStore

    folder = folder_of(url)
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        return Bucket(LocalStore(folder, automatic_cleanup=False, mkdir=True), url)
    except Exception as error:
        why = (error.strerror if isinstance(error, OSError) else None) or first_line(str(error))
        raise StoreError(f"cannot open the folder {folder}: {why}", "choose another bucket") from error


def _put(store: ObjectStore, key: str, data: bytes | memoryview, mode: Literal["create", "overwrite"]) -> None:
    """Once more while another request for the key is under way, or what arrives is not what was sent."""
    import obstore

    for pause_s in (*_PUT_PAUSES_S, None):
        try:
            obstore.put(store, key, data, mode=mode, use_multipart=False)
            return
        except obstore.exceptions.BaseError as error:
            if pause_s is None or not (conflicts(error) or is_garbled(error)):
                raise
        time.sleep(pause_s)
