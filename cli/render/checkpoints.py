"""Checkpoints as a table, and as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpuctl.cli.render.terminal import ago, count, number, out, say, size, table
from gpuctl.cluster.checkpoints.verification import CheckpointCheck
from gpuctl.cluster.records.snapshots import Snapshot

Copies = Mapping[str, Sequence[str]]
"""By a checkpoint's path: the nodes whose disks have copies of it."""


def print_table(found: Sequence[CheckpointCheck], copies: Copies) -> None:
    header = ["STEP", "SIZE", "ADDED", "ROUND", "SAVED", "REASON", "STATE", "LOCATION"]
    with_metrics = any(one.entry.metrics for one in found)
    rows = [_row(one, copies, with_metrics) for one in found]
    for line in table([*header, *(["METRICS"] if with_metrics else [])], rows, give=[8] if with_metrics else []):
        out(line)
    for one in found:
        if not one.whole:
            more = f" (and {len(one.faults) - 1} more)" if len(one.faults) > 1 else ""
            say(f"step {one.entry.step} is damaged: {one.faults[0].what}{more}")


def _row(one: CheckpointCheck, copies: Copies, with_metrics: bool) -> list[str]:
    entry = one.entry
    near = copies.get(entry.path, ())
    row = [
        str(entry.step),
        size(entry.bytes),
        size(entry.written),
        str(entry.round),
        ago(entry.at),
        entry.reason,
        "whole" if one.whole else "damaged",
        f"{count(len(near), 'node')}, bucket" if near else "bucket",
    ]
    if with_metrics:
        row.append(" ".join(f"{name}={number(value)}" for name, value in entry.metrics.items()) or "-")
    return row


def say_damage(what: str, faults: Sequence[str]) -> None:
    out(f"{what}: {'damaged' if faults else 'whole'}")
    for fault in faults:
        out(f"  {fault}")


def checkpoint_as_json(one: CheckpointCheck, copies: Copies) -> dict[str, Any]:
    entry = one.entry
    return {
        "step": entry.step,
        "bytes": entry.bytes,
        "written": entry.written,
        "round": entry.round,
        "ranks": entry.world,
        "at": entry.at,
        "age_s": max(0.0, time.time() - entry.at),
        "took_s": entry.took_s,
        "reason": entry.reason,
        "left_s": entry.left_s,
        "whole": one.whole,
        "faults": [fault.what for fault in one.faults],
        "nodes": copies.get(entry.path, ()),
        "metrics": entry.metrics,
        "path": entry.path,
    }


def files_as_json(files: Snapshot) -> dict[str, Any]:
    sizes = {path: file.size for path, file in files.files.items()}
    return {"round": files.round, "at": files.at, "bytes": sum(sizes.values()), "sizes": sizes}
