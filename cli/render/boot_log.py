"""The boot log of a machine: how it came to be a node, or did not, as ``gpuctl logs --boot`` shows it."""

from __future__ import annotations

import sys
import time

import msgspec

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import BootReport
from gpuctl.cluster.storage.interface import Store


def show(store: Store, node: str, *, as_json: bool) -> None:
    """The log on standard output, and how it ended on the other. Raises ``BadInput`` for a node that never booted."""
    key = layout.boot_report(node)
    told, log = store.get_many([key, layout.boot_log(node)])
    if told is None:
        raise BadInput(f"no boot report of {node!r}", _those_there_are(store))
    report = decode(told, BootReport, key)
    text = (log or b"").decode(errors="replace")
    if as_json:
        print(msgspec.json.encode({**msgspec.structs.asdict(report), "log": text}).decode())
        return
    sys.stdout.write(text)
    sys.stdout.flush()
    print(_line(report), file=sys.stderr)


def _line(report: BootReport) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(report.at))
    match report.state:
        case "ready":
            return f"{report.node} is ready since {since}"
        case "failed":
            return f"{report.node} failed at {since} in {report.step}: {report.reason}"
        case "booting":
            tried = f"; tried again after: {report.reason}" if report.reason else ""
            return f"{report.node} was at {report.step or 'the beginning'} at {since}{tried}"


def _those_there_are(store: Store) -> str:
    files = (entry.key.removeprefix(f"{layout.BOOT}/") for entry in store.list(layout.BOOT))
    names = sorted(name.removesuffix(".json") for name in files if "/" not in name and name.endswith(".json"))
    if not names:
        return "no machine of this cluster has booted yet; those of the local provider never do"
    return f"there are: {', '.join(names)}"
