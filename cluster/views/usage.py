"""How long each rented machine was there: what ``gpuctl cost`` reckons with.

A machine tells what it is when it boots and shows that it lives by its heartbeat. Both go when the cluster goes, so
what they say is noted in ``stays/`` before. Wall clocks throughout: this is for people.
"""

from __future__ import annotations

import time

from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import BootReport, MachineUsage
from gpuctl.cluster.storage.interface import Store
from gpuctl.cluster.storage.record_io import read_folder

SILENT_S = 120.0
"""After which a node without a heartbeat is not there any more."""
_BOOTING_S = 1800.0
"""The same while a machine boots, which tells of itself only when it takes another step."""


def read(store: Store, now: float | None = None) -> list[MachineUsage]:
    """The usage of every machine the cluster ever had, the first one first. ``until`` is ``now`` for those that still
    are."""
    now = time.time() if now is None else now
    found = {usage.node: usage for _, usage in read_folder(store, layout.MACHINE_USAGE, MachineUsage)}
    beats = {entry.key: entry.modified for entry in store.list(layout.NODES)}
    for entry, report in read_folder(store, layout.BOOT, BootReport):
        if not report.type:  # no cloud's
            continue
        beat = beats.get(layout.node(report.node), 0.0)
        last = max(entry.modified, beat)
        silent_s = _BOOTING_S if report.state == "booting" else SILENT_S
        before = found.get(report.node)
        found[report.node] = MachineUsage(
            node=report.node,
            type=report.type,
            zone=report.zone,
            life=report.life,
            since=min(report.booted_at, before.since) if before else report.booted_at,
            until=now if now - last < silent_s else max(last, before.until if before else 0.0),
        )
    return sorted(found.values(), key=lambda usage: (usage.since, usage.node))


def note(store: Store, now: float | None = None) -> None:
    """Keep what is known of all machines, before the cluster forgets it."""
    for usage in read(store, now):
        store.put(layout.machine_usage(usage.node), encode(usage))


def note_end(store: Store, node: str, now: float) -> None:
    """Keep that ``node``, which rubs out its heartbeat, was here until ``now``. Two requests: it has little time."""
    key = layout.boot_report(node)
    data = store.get(key)
    report = decode(data, BootReport, key) if data is not None else None
    if report is not None and report.type:
        usage = MachineUsage(
            node=node, type=report.type, zone=report.zone, life=report.life, since=report.booted_at, until=now
        )
        store.put(layout.machine_usage(node), encode(usage))
