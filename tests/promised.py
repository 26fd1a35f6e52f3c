"""Programs that ``.ci/install-system`` installs: where it has run, no test may be left out for want of one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable

from tests.paths import ROOT

LEFT_OUT = 6
"""Exit code of a run that lacked one. pytest's own end with 5, and 1 would be tried again."""
INSTALL = "sudo .ci/install-system"
_AZURITE = "Azurite"


def programs() -> dict[str, str]:
    """Their Debian packages."""
    found = re.search(r"^NEEDED=\((.*?)\)", (ROOT / ".ci" / "install-system").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return dict(pair.split(":") for pair in found[1].split())


def lacking(reasons: Iterable[str], path: str | None = None) -> list[str]:
    """Those for want of which a test was skipped, if it said so. ``path`` is where programs are looked for."""
    path = path or f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    said = "\n".join(reasons)
    found = []
    for program, package in programs().items():
        there = shutil.which(program, path=path)
        named = re.search(rf"\b({re.escape(program)}|{re.escape(package)})\b", said)
        unseen = re.search(rf"\b{re.escape(program)}\b\W*not found", said)  # it is not where it was looked for
        if unseen or (named and not there):
            found.append(program)
    return found + [_AZURITE] * (f"{_AZURITE} is not installed" in said)
