"""A writer that contends for a ledger's versions: in a thread, or as a process (``python contender.py URL NAME …``)."""

from __future__ import annotations

import json
import sys

from gpuctl.cluster.agreement.ledger import Ledger
from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.storage.bucket import open_bucket

Claims = dict[int, dict[str, str]]
"""Version → the value that this writer was told it had written there."""


def ledger_at(url: str, keep: int | None) -> Ledger[dict[str, str]]:
    return Ledger(open_bucket(url, patience_s=3.0, timeout_s=1.0), "race", dict[str, str], keep=keep)


def contend(url: str, name: str, attempts: int, keep: int | None) -> Claims:
    """Commit again and again on the newest version; each value names itself and the one it follows."""
    ledger = ledger_at(url, keep)
    claims: Claims = {}
    for attempt in range(attempts):
        try:
            newest = ledger.read()
            value = {"is": f"{name}.{attempt}", "after": (newest.value or {"is": ""})["is"]}
            if ledger.commit(value, newest.number):
                claims[newest.number + 1] = value
        except StoreUnavailable:
            continue
    return claims


if __name__ == "__main__":
    url, name, attempts, keep = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(contend(url, name, int(attempts), int(keep) if keep != "None" else None)), flush=True)
