"""A user of gpuctl with an account of some cloud on loopback: what the tests of ``up`` and ``down`` share. The test
plays the machines: it says with a heartbeat that a machine has become a node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Bucket, open_bucket
from gpuctl.cluster.records import BootReport, ClusterSpec, NodeRecord, decode, encode
from gpuctl.stacks.known import KnownCluster
from tests import person
from tests.stacks import pulumi_cli


class User(ABC):
    """With gpuctl, and a stand-in for Pulumi on PATH. At its end as a context no machine boots any more."""

    up_flags: tuple[str, ...]
    """Of every ``up``: the provider, and a type."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        """``env``: where the cloud is, and with whose credentials."""
        self.folder = folder
        self.cluster = f"c{uuid.uuid4().hex[:8]}"
        # The installed command is beside the interpreter.
        path = f"{pulumi_cli.install(folder / 'bin')}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "GPUCTL_STATE_DIR": str(folder / "state"), **env}
        self._booting: tuple[threading.Event, threading.Thread] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_booting()

    def run(self, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpuctl.cli.main", *args, "--cluster", self.cluster]
        done = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    def up(self, *more: str, code: int = 0, nodes: str = "2") -> subprocess.CompletedProcess[str]:
        return self.run("up", *self.up_flags, "--nodes", nodes, "-y", *more, code=code)

    def at_a_terminal(self, *args: str, typed: str) -> tuple[int, str]:
        """The exit code, and what it shows."""
        env = self.env | {"TERM": "xterm-256color"}
        code, shown = person.at_a_terminal([*args, "--cluster", self.cluster], self.folder, env, typed=typed)
        return code, person.plain(shown)

    def known(self) -> KnownCluster:
        path = self.folder / "state" / "clusters" / f"{self.cluster}.json"
        return decode(path.read_bytes(), KnownCluster, str(path))

    def bucket(self) -> Bucket:
        return open_bucket(self.known().bucket)

    def spec(self) -> ClusterSpec:
        return decode(self.bucket().get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)

    def last_up(self) -> dict[str, Any]:
        """What was asked for."""
        return dict(msgspec.json.decode(self.last_up_path().read_bytes())["request"])

    def last_up_path(self) -> Path:
        return self.folder / "state" / "pulumi" / self.cluster / "up.json"

    def declared(self, kind: str) -> dict[str, Any]:
        """What the stack's own state says that the one resource whose type ends so was given."""
        state = msgspec.json.decode((self.last_up_path().parent / "state.json").read_bytes())
        (found,) = [one["inputs"] for one in state["resources"] if one["type"].endswith(f":{kind}")]
        return dict(found)

    @abstractmethod
    def machines(self) -> list[str]:
        """Names of those that the cluster has."""

    def boot_machines(self, comes: Callable[[str], bool] = lambda _name: True) -> None:
        """From now on every machine becomes a node, as soon as it is there, for whose name ``comes`` says so; the
        others fail to boot. What was said of it before counts no more, and machines that were there have lost their
        power."""
        self._end_booting()
        over = threading.Event()
        thread = threading.Thread(target=self._boot, args=(comes, over), daemon=True)
        thread.start()
        self._booting = over, thread

    def _end_booting(self) -> None:
        if self._booting is not None:
            over, thread = self._booting
            over.set()
            thread.join(30)

    def _boot(self, comes: Callable[[str], bool], over: threading.Event) -> None:
        comes_up: dict[str, bool] = {}
        beat = 0
        while not over.wait(0.2):
            beat += 1
            try:
                bucket, machines = self.bucket(), self.machines()
                if bucket.get(layout.CLUSTER) is None:
                    continue
            except Exception:  # noqa: BLE001 - nothing is there yet
                continue
            for name in machines:
                is_new = name not in comes_up
                if is_new:
                    comes_up[name] = comes(name)
                if comes_up[name]:
                    record = NodeRecord(node=name, incarnation="i", beat=beat, address="10.0.0.1", port=1)
                    bucket.put(layout.node(name), encode(record))
                elif is_new:
                    report = BootReport(node=name, state="failed", step="driver", reason="nvidia-smi finds no GPU")
                    bucket.put(layout.boot_report(name), encode(report))
