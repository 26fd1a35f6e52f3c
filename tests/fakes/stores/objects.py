"""Objects in buckets, with conditional writes: what ``gcs.py`` serves. Threads share one ``Buckets``.

They are in memory, and in a journal if one is given: what was answered then outlives the process, however it ends.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

PAGE = 10
"""Most names in one page of a listing: few, so that a test which lists a dozen objects turns a page."""


class Refusal(Exception):
    """HTTP's status, and Google's code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def no_bucket() -> Refusal:
    return Refusal(404, "NoSuchBucket", "The specified bucket does not exist.")


def no_object() -> Refusal:
    return Refusal(404, "NoSuchKey", "The specified key does not exist.")


def no_upload() -> Refusal:
    return Refusal(404, "NoSuchUpload", "The requested upload was not found.")


def no_part() -> Refusal:
    return Refusal(400, "InvalidPart", "One or more of the specified parts could not be found.")


def unmet() -> Refusal:
    return Refusal(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")


@dataclass(frozen=True, slots=True)
class Object:
    data: bytes
    tag: str
    """Of the content, in quotes."""
    generation: int
    """Grows with every write, in all buckets. No object has 0."""
    modified: datetime


class Page(NamedTuple):
    names: dict[str, Object | None]
    """Keys with their objects, and common prefixes, in order."""
    last: str | None
    """The name that the next page begins after; ``None`` if there is none."""


@dataclass
class Buckets:
    """Every method does what it does at one instant, as seen by the others. All raise ``Refusal``.

    ``journal`` has a line for each change but for those of uploads that are under way: these go with the process.
    """

    journal: Path | None = None
    _buckets: dict[str, dict[str, Object]] = field(default_factory=dict)
    _uploads: dict[str, dict[int, Object]] = field(default_factory=dict)
    """The parts of each upload in parts that is under way."""
    _generations: Iterator[int] = field(default_factory=lambda: itertools.count(time.time_ns() // 1000))
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        if self.journal is not None and self.journal.exists():
            text = self.journal.read_text()
            whole = text[: text.rfind("\n") + 1]  # of what follows its writer was killed, and answered nothing
            self.journal.write_text(whole)
            for line in whole.splitlines():
                self._replay(*json.loads(line))

    def create(self, bucket: str) -> None:
        with self._lock:
            self._buckets.setdefault(bucket, {})
            self._note(bucket)

    def drop(self, bucket: str) -> None:
        with self._lock:
            if self._objects(bucket):
                raise Refusal(409, "BucketNotEmpty", "The bucket you tried to delete is not empty.")
            del self._buckets[bucket]
            self._note(bucket, None)

    def read(self, bucket: str, key: str) -> Object:
        with self._lock:
            if found := self._objects(bucket).get(key):
                return found
            raise no_object()

    def write(self, bucket: str, key: str, data: bytes, generation: int | None = None) -> Object:
        """Only over this ``generation``, when one is given; 0 means that nothing is there."""
        new = self._object(data)
        with self._lock:
            objects = self._objects(bucket)
            there = objects[key].generation if key in objects else 0
            if generation is not None and generation != there:
                raise unmet()
            objects[key] = new
            self._note(bucket, key, new)
            return new

    def remove(self, bucket: str, key: str) -> None:
        with self._lock:
            if self._objects(bucket).pop(key, None) is None:
                raise no_object()
            self._note(bucket, key)

    def page(self, bucket: str, prefix: str, delimiter: str, after: str) -> Page:
        names: dict[str, Object | None] = {}
        with self._lock:
            for key, there in self._objects(bucket).items():
                if key.startswith(prefix):
                    head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                    names[prefix + head + cut if cut else key] = None if cut else there
        following = sorted(name for name in names if name > after)
        shown = following[:PAGE]
        return Page({name: names[name] for name in shown}, shown[-1] if len(following) > PAGE else None)

    def begin(self, bucket: str) -> str:
        with self._lock:
            self._objects(bucket)
            upload = f"upload-{next(self._generations)}"
            self._uploads[upload] = {}
            return upload

    def add(self, upload: str, number: int, data: bytes) -> Object:
        part = self._object(data)
        with self._lock:
            self._parts(upload)[number] = part
            return part

    def finish(self, bucket: str, key: str, upload: str, wanted: list[tuple[int, str]]) -> Object:
        """Make one object of the parts in ``wanted``: each a number, and the tag of what it must hold."""
        with self._lock:
            parts = self._parts(upload)
            if not wanted or any(number not in parts or parts[number].tag != tag for number, tag in wanted):
                raise no_part()
            whole = self.write(bucket, key, b"".join(parts[number].data for number, _ in wanted))
            del self._uploads[upload]
            return whole

    def abort(self, upload: str) -> None:
        with self._lock:
            self._parts(upload)
            del self._uploads[upload]

    def _note(self, bucket: str, key: str | None = "", there: Object | None = None) -> None:
        """That ``there`` is what lies at ``key`` now, or nothing does; without a key, that there is this bucket, and
        with ``None``, that there is none."""
        if self.journal is not None:
            data = None if there is None else base64.b64encode(there.data).decode()
            with self.journal.open("a") as file:
                file.write(json.dumps([bucket, key, data]) + "\n")

    def _replay(self, bucket: str, key: str | None, data: str | None) -> None:
        if key is None:
            self._buckets.pop(bucket, None)
            return
        objects = self._buckets.setdefault(bucket, {})
        objects.pop(key, None)
        if data is not None:
            objects[key] = self._object(base64.b64decode(data))

    def _object(self, data: bytes) -> Object:
        return Object(data, f'"{hashlib.md5(data).hexdigest()}"', next(self._generations), datetime.now(UTC))

    def _objects(self, bucket: str) -> dict[str, Object]:
        if bucket not in self._buckets:
            raise no_bucket()
        return self._buckets[bucket]

    def _parts(self, upload: str) -> dict[int, Object]:
        if upload not in self._uploads:
            raise no_upload()
        return self._uploads[upload]
