"""The engine's events, in the log that the Automation API reads along, for ``pulumi_cli``."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Events:
    def __init__(self, path: str) -> None:
        """``path``: empty where nobody reads."""
        self._path = path
        self._sequence = 0
        self._writing = threading.Lock()
        self.changes: Counter[str] = Counter()
        """How many resources have come to what, by Pulumi's word for it."""

    def begun(self, verb: str, urn: str, *, retained: bool = False) -> None:
        self._step("resourcePreEvent", verb, urn, retained=retained)
        _show(urn, f"{verb} begun")

    def done(self, verb: str, urn: str, *, retained: bool = False) -> None:
        """``retained``: the deletion of one that is kept, which is in the cloud as before."""
        self.changes[verb] += 1
        self._step("resOutputsEvent", verb, urn, retained=retained)
        _show(urn, f"{verb} done")

    def same(self, urn: str) -> None:
        """Nobody is shown it."""
        self.changes["same"] += 1
        self._step("resourcePreEvent", "same", urn)

    def failed(self, verb: str, urn: str, why: str) -> None:
        self.said("error", f"{why}\n", urn)
        self._step("resOpFailedEvent", verb, urn)
        _show(urn, f"{verb} failed: {why}")

    def said(self, severity: str, message: str, urn: str = "") -> None:
        told = {"prefix": f"{severity}: ", "message": message, "color": "raw", "severity": severity}
        self._write({"diagnosticEvent": {"urn": urn, **told} if urn else told})

    def end(self) -> None:
        summary = {"maybeCorrupt": False, "durationSeconds": 1, "resourceChanges": dict(self.changes)}
        self._write({"summaryEvent": summary})
        self._write({"cancelEvent": {}})

    def _step(self, event: str, verb: str, urn: str, *, retained: bool = False) -> None:
        kind = urn.split("::")[2].rpartition("$")[2]
        about = {"type": kind, "urn": urn, "custom": True, "id": "", "parent": "", "inputs": {}, "outputs": {}}
        whole = {**about, "provider": "", "retainOnDelete": retained}
        old = None if verb.startswith("create") else whole
        new = None if verb.startswith("delete") else whole
        said = {"op": verb, "urn": urn, "type": kind, "old": old, "new": new, "detailedDiff": None, "provider": ""}
        self._write({event: {"metadata": said}})

    def _write(self, event: Record) -> None:
        if not self._path:
            return
        with self._writing:
            self._sequence += 1
            with Path(self._path).open("a") as file:
                file.write(json.dumps({"sequence": self._sequence, "timestamp": 0, **event}) + "\n")


def _show(urn: str, what: str) -> None:
    """The real one shows each step, and dies of it where nobody reads any more."""
    _, _, kind, name = urn.split("::", 3)
    print(f"    {kind.rpartition('$')[2]} {name} {what}", flush=True)
