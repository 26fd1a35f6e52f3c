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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import BootReport, NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.state.clusters import KnownCluster
from tests.fakes import person
from tests.fakes.pulumi import cli, obstacles, resource_plugin
from tests.waiting import PATIENCE_S

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@laptop\n"


class User(ABC):
    """With gpuctl, and a stand-in for Pulumi on PATH. At its end as a context no machine boots any more."""

    up_flags: Sequence[str]
    """Of every ``up``: the provider, and a type."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        """``env``: where the cloud is, and with whose credentials."""
        self.folder = folder
        self.cluster = f"c{uuid.uuid4().hex[:8]}"
        (folder / ".ssh").mkdir()
        (folder / ".ssh" / "id_ed25519.pub").write_text(KEY)  # and not whoever's who runs the tests
        # The installed command is beside the interpreter.
        path = f"{installed(folder / 'bin')}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.obstacles = obstacles.Obstacles(folder / "obstacles")
        self.env = {
            **os.environ,
            "PATH": path,
            "HOME": str(folder),
            "GPUCTL_STATE_DIR": str(folder / "state"),
            "PULUMI_HOME": str(folder / "pulumi"),
            obstacles.FOLDER: str(folder / "obstacles"),
            **env,
        }
        self._booting: tuple[threading.Event, threading.Thread] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_booting()

    def run(self, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run_alone(*args, "--cluster", self.cluster, code=code)

    def run_alone(self, *args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Without naming the cluster. ``code``: what it must end with, ``None`` if the caller sees to that."""
        # These nodes run nothing: a test of their fabric would wait for ever.
        flags = ("--no-verify",) if args[0] == "up" else ()
        command = [sys.executable, "-m", "gpuctl.cli.main", *args, *flags]
        try:
            done = subprocess.run(
                command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired as late:
            said = (late.stderr or b"").decode() if isinstance(late.stderr, bytes) else late.stderr
            raise AssertionError(f"{' '.join(args)} does not end: {said}") from None
        assert code in (None, done.returncode), f"{done.stdout}\n{done.stderr}"
        # Python's own words, also as it ends, are for nobody who uses a command.
        assert "Traceback" not in done.stderr, done.stderr
        assert "Exception ignored" not in done.stderr, done.stderr
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
        there = [one for one in self.deployment()["resources"] if one["custom"]]
        (found,) = [one["inputs"] for one in there if one["type"].endswith(f":{kind}")]
        return dict(found)

    def stack_state(self) -> Path:
        """The file, as Pulumi keeps it in a backend that is a folder."""
        folder = self.last_up_path().parent / "state" / ".pulumi" / "stacks" / "gpuctl"
        return folder / f"{self.cluster}.json"

    def deployment(self) -> dict[str, Any]:
        """The stack's state: ``resources``, and ``pending_operations`` if there are any."""
        return dict(msgspec.json.decode(self.stack_state().read_bytes())["checkpoint"]["latest"])

    @abstractmethod
    def machines(self) -> list[str]:
        """Names of those that the cluster has."""

    @abstractmethod
    def delete_bucket(self) -> None:
        """With all that is in it, as somebody may do by hand."""

    def boot_machines(self, comes: Callable[[str], bool] = lambda _name: True) -> None:
        """From now on every machine becomes a node, as soon as it is there, for whose name ``comes`` says so; the
        others fail to boot. What was said of it before counts no more, and machines that were there have lost their
        power."""
        self.end_booting()
        over = threading.Event()
        thread = threading.Thread(target=self._boot, args=(comes, over), daemon=True)
        thread.start()
        self._booting = over, thread

    def end_booting(self) -> None:
        if self._booting is not None:
            over, thread = self._booting
            over.set()
            thread.join(30)

    def _boot(self, comes: Callable[[str], bool], over: threading.Event) -> None:
        comes_up: dict[str, bool] = {}
        opened: dict[str, Bucket] = {}
        beat = 0
        while not over.wait(0.5):
            beat += 1
            try:
                url = self.known().bucket
                bucket = opened[url] = opened.get(url) or open_bucket(url)
                if bucket.get(layout.CLUSTER) is None:
                    continue
                machines = self.machines()
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


def installed(folder: Path) -> Path:
    """A folder for PATH with the resource plug-ins, and with a stand-in for Pulumi's CLI where there is no real one."""
    resource_plugin.install(folder)
    return folder if cli.real() else cli.install(folder)
