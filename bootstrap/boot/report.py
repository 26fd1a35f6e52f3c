"""How far this machine is, told to the bucket: ``boot/<node>.json`` (a ``BootReport`` of gpuctl's) and the log.

A bucket that is away stops nothing; what it has missed it is told with the next step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from .metadata import Instance
from .store import BootStore

_LOG_BYTES = 1 << 20
"""Of the log's end: a pip that talks fills no bucket."""


class Reporter:
    def __init__(
        self, root: Path, node: str, instance: Instance, store: BootStore, now: Callable[[], float] = time.time
    ):
        self._root = root
        self._node = node
        self._instance = instance
        self._store = store
        self._now = now

    def tell(self, state: str, step: str = "", reason: str = "") -> bool:
        """Whether the bucket took it."""
        said = {
            "node": self._node,
            "state": state,
            "step": step,
            "reason": reason,
            "at": self._now(),
            "address": self._instance.address,
            "public_address": self._instance.public_address,
            "host_keys": host_keys(self._root),
            "user": login_name(self._root),
            "type": self._instance.type,
            "zone": self._instance.zone,
            "life": self._instance.life,
            "booted_at": self._now() - uptime_s(),
        }
        try:
            self._store.put(f"boot/{self._node}.json", json.dumps(said).encode(), tries=1)  # the next step tries again
            self._store.put(f"boot/{self._node}.log", _end_of(self._root / "var/log/gpuctl-boot.log"), tries=1)
        except (OSError, ValueError, LookupError) as error:
            print(f"cannot report to the bucket: {step or state}: {error}", flush=True)
            return False
        return True


def uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def host_keys(root: Path) -> list[str]:
    """What sshd shows, without the comments."""
    files = sorted((root / "etc/ssh").glob("ssh_host_*_key.pub"))
    return [" ".join(path.read_text().split()[:2]) for path in files]


def login_name(root: Path) -> str:
    """The first user of the machine that a key can log in as."""
    path = root / "etc/passwd"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        fields = line.split(":")
        if len(fields) < 6 or not fields[2].isdecimal():  # a line of NIS, such as "+::::::"
            continue
        name, uid, home = fields[0], int(fields[2]), fields[5]
        if 1000 <= uid < 60000 and (root / home.lstrip("/") / ".ssh/authorized_keys").exists():
            return name
    return "root"


def _end_of(path: Path) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return file.read()
