"""How a person names a machine: as for ssh."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpuctl.cluster.errors import BadInput


class SshTarget(NamedTuple):
    """A machine that ``--hosts`` names."""

    text: str
    node: str
    """The node's name in the cluster."""
    words: tuple[str, ...]
    """What ssh takes for it."""


def parse_target(text: str) -> SshTarget:
    """``[USER@]HOST[:PORT]``, where HOST is a name, an address or a ``Host`` of ssh's configuration; else ``BadInput``.

    >>> parse_target("ada@lab-7:2222")
    SshTarget(text='ada@lab-7:2222', node='lab-7', words=('-p', '2222', 'ada@lab-7'))
    """
    found = re.fullmatch(r"(?:([\w.-]+)@)?(\[[0-9A-Fa-f:]+\]|\w[\w.-]*)(?::(\d{1,5}))?", text, re.ASCII)
    if not found:
        raise BadInput(f"invalid host {text!r}", "for example lab-7, ada@lab-7 or 10.0.0.7:2222")
    user, host, port = found.groups()
    host = host.strip("[]")
    where = f"{user}@{host}" if user else host
    return SshTarget(text, re.sub(r"[^\w.-]", "-", host).strip(".-"), (*(("-p", port) if port else ()), where))
