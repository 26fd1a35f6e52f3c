"""The environments that are in the bucket: looked up by what was asked for, published, listed, removed.

An environment exists once its ``environment.json`` does, which is written after its archives. What a request means is
written once, after that: nodes that come later never resolve it anew, and get what the first one got.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, CorruptRecord
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.environments import Environment, ResolvedRequest
from gpuctl.cluster.storage.interface import Entry, Store

_SHORT = 12
"""Digits of a digest that people see."""


@dataclass(frozen=True, slots=True)
class StoredEnvironment:
    """An environment in the bucket."""

    environment: Environment
    bytes: int
    """Of its objects, as they are stored."""
    jobs: tuple[str, ...]
    """Those that ran in it, oldest first."""
    used_at: float
    """When the last of them began, by the store's clock; when it was built if there is none."""

    @property
    def name(self) -> str:
        return short(self.environment.digest)


def short(digest: str) -> str:
    """A digest as people see it, and may give it."""
    return digest[:_SHORT]


def resolved(store: Store, request: str) -> Environment | None:
    """What a request means; ``None`` while nobody has published that, or if it was removed."""
    data = store.get(layout.environment_request(request))
    if data is None:
        return None
    try:
        return built(store, decode(data, ResolvedRequest, request).environment)
    except CorruptRecord:
        return None


def built(store: Store, digest: str) -> Environment | None:
    """The environment of that digest, if the bucket has it."""
    data = store.get(layout.environment(digest))
    try:
        return None if data is None else decode(data, Environment, layout.environment(digest))
    except CorruptRecord:  # another version of gpuctl wrote it, and this one builds its own
        return None


def publish(store: Store, request: str, environment: Environment) -> Environment:
    """Make known an environment whose archives are in the bucket; returns the one that the request means, which may
    have been published by another node meanwhile."""
    if not store.create(layout.environment(environment.digest), encode(environment)):
        environment = built(store, environment.digest) or environment
    answer = encode(ResolvedRequest(environment=environment.digest))
    if not store.create(layout.environment_request(request), answer):
        found = resolved(store, request)
        if found is None:  # it was removed, and what it meant with it
            store.put(layout.environment_request(request), answer)
        return found or environment
    return environment


def note_use(store: Store, digest: str, job: str) -> None:
    """Note that a job runs in an environment, for ``listed``."""
    store.create(layout.environment_use(digest, job), b"")


def listed(store: Store) -> list[StoredEnvironment]:
    """All environments in the bucket, the one that was used last first."""
    entries = store.list(f"{layout.ENVIRONMENTS}/built")
    uses = store.list(f"{layout.ENVIRONMENTS}/used")
    found = []
    for digest in sorted({_digest(entry) for entry in entries}):
        environment = built(store, digest)
        if environment is None:
            continue
        own = sorted((entry for entry in uses if _digest(entry) == digest), key=lambda entry: entry.modified)
        found.append(
            StoredEnvironment(
                environment,
                bytes=sum(entry.size for entry in entries if _digest(entry) == digest),
                jobs=tuple(entry.key.rpartition("/")[2] for entry in own),
                used_at=max([environment.built_at, *(entry.modified for entry in own)]),
            )
        )
    return sorted(found, key=lambda one: one.used_at, reverse=True)


def find(stored: list[StoredEnvironment], name: str) -> StoredEnvironment:
    """The environment whose digest begins with ``name``. Raises ``BadInput`` if that is none, or several."""
    found = [one for one in stored if name and one.environment.digest.startswith(name)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(one.name for one in stored[:5]) or "none"
    what = "is not an environment" if not found else "is the beginning of several"
    raise BadInput(f"{name} {what}", f"there are: {there} (gpuctl env ls)")


def remove(store: Store, digest: str) -> None:
    """Remove an environment with all that is known of it. A job that asks for it again builds it again."""
    requests = [entry.key for entry in store.list(f"{layout.ENVIRONMENTS}/requests")]
    answers = store.get_many(requests) if requests else []
    gone = [key for key, data in zip(requests, answers, strict=True) if data and _means(data, digest)]
    store.delete(gone)
    store.delete([layout.environment(digest)])
    for folder in ("built", "used"):
        store.delete([entry.key for entry in store.list(f"{layout.ENVIRONMENTS}/{folder}/{digest}")])


def _digest(entry: Entry) -> str:
    return entry.key.split("/")[2]


def _means(data: bytes, digest: str) -> bool:
    try:
        return decode(data, ResolvedRequest, "request").environment == digest
    except CorruptRecord:
        return False
