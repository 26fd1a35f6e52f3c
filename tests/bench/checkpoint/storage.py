"""The one server that all contenders write to, and where in it each of them writes."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from tests.fakes.stores import s3
from tests.fakes.stores.serving import started

_SERVER = Path(__file__).with_name("server.py")
_WARM = ["MALLOC_ARENA_MAX=1", "MALLOC_MMAP_THRESHOLD_=33554432", "MALLOC_TRIM_THRESHOLD_=20000000000"]
"""The server keeps the memory of objects that were deleted, so that a contender does not measure its page faults."""
_IN_MEMORY = "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE=20000000000"
"""Bytes up to which an object stays in its memory; from 5 MB on it would be a temporary file, which is slower."""
_USER = "bench"


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix that one contender has for itself."""

    endpoint: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """What ``open_bucket`` takes."""
        address, _, options = s3.url(self.endpoint, self.bucket).partition("?")
        return f"{address.removesuffix('prefix')}{self.prefix}?{options}"

    def store(self) -> S3Store:
        """obstore's own."""
        return S3Store(
            self.bucket,
            prefix=self.prefix,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=_USER,
            secret_access_key=_USER,
            client_options={"allow_http": True, "timeout": timedelta(minutes=5)},
        )

    def fsspec_path(self, name: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}/{name}"

    def fsspec_options(self) -> dict[str, Any]:
        """For s3fs."""
        client = {"endpoint_url": self.endpoint, "region_name": "us-east-1"}
        return {"key": _USER, "secret": _USER, "client_kwargs": client, "use_listings_cache": False}

    def boto3_options(self) -> dict[str, str]:
        keys = {"aws_access_key_id": _USER, "aws_secret_access_key": _USER}
        return {"endpoint_url": self.endpoint, "region_name": "us-east-1", **keys}

    def sizes(self) -> dict[str, int]:
        """Bytes of every object, by its key below the prefix."""
        return {item["path"]: item["size"] for batch in obstore.list(self.store()) for item in batch}

    def clear(self) -> None:
        if keys := list(self.sizes()):
            obstore.delete(self.store(), keys)


@dataclass(frozen=True, slots=True)
class Server:
    """moto's S3 in a process of its own."""

    pid: int
    endpoint: str
    bucket: str = "bench"

    def place(self, name: str) -> Place:
        """A new one."""
        return Place(self.endpoint, self.bucket, f"{name.replace(' ', '-')}-{uuid.uuid4().hex[:8]}")

    @contextmanager
    def on_core(self, core: int) -> Iterator[None]:
        """For a while on one core only, and there only when nobody else wants it. New threads inherit both from those
        that start them; when it is over, all threads get back what the process had."""
        cores = os.sched_getaffinity(self.pid)
        _for_each_thread(self.pid, {core}, os.SCHED_IDLE)
        try:
            yield
        finally:
            _for_each_thread(self.pid, cores, os.SCHED_OTHER)


@contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Server]:
    command = ["env", *_WARM, _IN_MEMORY, sys.executable, str(_SERVER), address]
    with started(command, r"^(\d+ \d+)$") as answer:
        pid, port = answer.split()
        server = Server(int(pid), f"http://{address}:{port}")
        s3.create(server.endpoint, server.bucket)
        yield server


def _for_each_thread(pid: int, cores: set[int], policy: int) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))
        except ProcessLookupError:
            continue  # it has ended meanwhile
