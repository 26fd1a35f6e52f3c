"""How long each rented machine was there: what ``gpuctl cost`` reckons with.

A machine tells what it is when it boots and shows that it lives by its heartbeat. Both go when the cluster goes, so
what they say is noted in ``stays/`` before. Wall clocks throughout: this is for people.
"""

from __future__ import annotations

import time

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Store
from gpuctl.cluster.listing import read_folder
from gpuctl.cluster.records import BootReport, Stay, decode, encode

SILENT_S = 120.0
"""After which a node without a heartbeat is not there any more."""
_BOOTING_S = 1800.0
"""The same while a machine boots, which tells of itself only when it takes another step."""


def read(store: Store, now: float | None = None) -> list[Stay]:
    """Of every machine that was ever there, the first one first. ``until`` is ``now`` for those that still are."""
    now = time.time() if now is None else now
    found = {stay.node: stay for _, stay in read_folder(store, layout.STAYS, Stay)}
    beats = {entry.key: entry.modified for entry in store.list(layout.NODES)}
    for entry, report in read_folder(store, layout.BOOT, BootReport):
        if not report.type:  # no cloud's
            continue
        beat = beats.get(layout.node(report.node), 0.0)
        last = max(entry.modified, beat)
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
