"""``make preview``: what each cloud would be asked for, beside what it was asked for when that was last looked at.

    python -m tests.stacks.preview [--renew]

Prints the plans of ``samples`` and compares them with ``goldens/<provider>.json``; exits 1 and shows the difference if
one is another. ``--renew`` writes the goldens instead: read what changed before you commit it.
"""

from __future__ import annotations

import base64
import difflib
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName
from gpuctl.stacks.plan.planner import Plan
from tests.fakes.requests import asked, planned

GOLDENS = Path(__file__).with_name("goldens")
RENEW = "if that is what it should be: make preview RENEW=1"
_SENT_COMPRESSED = ("userData", "customData", "user-data")


def main(arguments: list[str]) -> int:
    different = 0
    for provider in CLOUDS:
        plan = planned(asked(provider))
        print(_told(plan))
        if arguments == ["--renew"]:
            golden(provider).write_text(rendered(plan))
        elif difference := compared(provider, plan):
            print(f"\n{difference}", file=sys.stderr)
            different += 1
    if different:
        print(f"preview: {different} of {len(CLOUDS)} plans are not the golden one; {RENEW}", file=sys.stderr)
    return 1 if different else 0


def golden(provider: CloudName) -> Path:
    return GOLDENS / f"{provider}.json"


def compared(provider: CloudName, plan: Plan) -> str:
    """How the plan differs from its golden, as ``diff -u`` would say it; empty if it does not."""
    path = golden(provider)
    before = path.read_text().splitlines() if path.exists() else []
    return "\n".join(difflib.unified_diff(before, rendered(plan).splitlines(), path.name, "now", lineterm="", n=4))


def rendered(plan: Plan) -> str:
    """As JSON that a person can read: policies and what cloud-init is sent stand in it as what they say. How gzip packs
    the latter depends on its version."""
    told = _unpacked(msgspec.to_builtins(plan))
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def _unpacked(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _unpacked(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_unpacked(inner) for inner in value]
    if key in _SENT_COMPRESSED:
        return gzip.decompress(base64.b64decode(value)).decode()
    if isinstance(value, str) and value.startswith("{"):
        return json.loads(value)
    return value


def _told(plan: Plan) -> str:
    request, cost = plan.request, plan.cost
    kinds = [f"  {count:3} {kind}" for kind, count in sorted(plan.counts().items())]
    findings = [f"  {finding.severity}: {finding.message} ({finding.hint})" for finding in plan.findings]
    per_hour = cost.per_hour(spot=False)
    price = "unknown" if per_hour is None else f"${per_hour:.2f} per hour on demand ({cost.date})"
    head = f"{request.provider}: {request.nodes_max} x {request.type} in {request.region}, {price}"
    return "\n".join([head, *kinds, *findings])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        os.environ["GPUCTL_STATE_DIR"] = empty  # prices that its user has refreshed are in no golden
        sys.exit(main(sys.argv[1:]))
