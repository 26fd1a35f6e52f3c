"""How long each rented machine was there: what ``gpuctl cost`` reckons with.

A machine tells what it is when it boots and shows that it lives by its heartbeat. Both go when the cluster goes, so
what they say is noted in ``stays/`` before. Wall clocks throughout: this is for people.
"""

from __future__ import annotations

import contextlib
import time

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Store
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records import BootReport, Stay, decode, encode

SILENT_S = 120.0
"""After which a node without a heartbeat is not there any more."""
_BOOTING_S = 1800.0
"""The same while a machine boots, which tells of itself only when it takes another step."""


def read(store: Store, now: float | None = None) -> list[Stay]:
    """Of every machine that was ever there, the first one first. ``until`` is ``now`` for those that still are."""
    now = time.time() if now is None else now
    found = {stay.node: stay for stay in _noted(store)}
    beats = {entry.key: entry.modified for entry in store.list(layout.NODES)}
    for report, told_at in _reports(store):
        beat = beats.get(layout.node(report.node), 0.0)
        last = max(told_at, beat)
        silent_s = _BOOTING_S if report.state == "booting" else SILENT_S
        before = found.get(report.node)
        found[report.node] = Stay(
            node=report.node,
            type=report.type,
            zone=report.zone,
            life=report.life,
            since=min(report.booted_at, before.since) if before else report.booted_at,
            until=now if now - last < silent_s else max(last, before.until if before else 0.0),
        )
    return sorted(found.values(), key=lambda stay: (stay.since, stay.node))


def note(store: Store, now: float | None = None) -> None:
    """Keep what is known of all machines, before the cluster forgets it."""
    for stay in read(store, now):
        store.put(layout.stay(stay.node), encode(stay))


def note_end(store: Store, node: str, now: float) -> None:
    """Keep that ``node``, which rubs out its heartbeat, was here until ``now``. Two requests: it has little time."""
    key = layout.boot_report(node)
    data = store.get(key)
    report = decode(data, BootReport, key) if data is not None else None
    if report is not None and report.type:
        stay = Stay(node=node, type=report.type, zone=report.zone, life=report.life, since=report.booted_at, until=now)
        store.put(layout.stay(node), encode(stay))


def _noted(store: Store) -> list[Stay]:
    keys = [entry.key for entry in store.list(layout.STAYS)]
    found = []
    for key, data in zip(keys, store.get_many(keys), strict=True):
        with contextlib.suppress(CorruptRecord):
            if data is not None:
                found.append(decode(data, Stay, key))
    return found


def _reports(store: Store) -> list[tuple[BootReport, float]]:
    """Of machines that a cloud has, and when the bucket got each."""
    entries = [entry for entry in store.list(layout.BOOT) if entry.key.endswith(".json")]
    found = []
    for entry, data in zip(entries, store.get_many([entry.key for entry in entries]), strict=True):
        with contextlib.suppress(CorruptRecord):
            report = decode(data, BootReport, entry.key) if data is not None else None
            if report is not None and report.type:
                found.append((report, entry.modified))
    return found
