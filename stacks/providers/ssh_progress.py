"""Waiting for machines of provider ssh to become nodes: what they tell the bucket, and where that is nothing, why."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import BootReport
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.stacks.providers.interface import Say
from gpuctl.stacks.providers.ssh_machine import MachineRefused, SshMachine

_READY_S = 3600.0
"""PyTorch with CUDA is several GB."""
_LOOK_EVERY_S = 0.5
_QUIET_S = 20.0
"""Without news in the bucket, after which a machine itself is asked."""
_AT_ONCE = 32


class SetupProgress:
    """The progress of machines that are becoming nodes.

    Args:
        bucket: the cluster's, which the machines report to.
        machines: those whose boot program was started.
        say: is told each step of each machine once.
        quiet_s: seconds without news in the bucket, after which a machine itself is asked.
    """

    def __init__(self, bucket: Bucket, machines: Iterable[SshMachine], say: Say, *, quiet_s: float = _QUIET_S) -> None:
        self.troubles: dict[str, GpuctlError] = {}
        """Why some will never be."""
        self._bucket = bucket
        self._say = say
        self._quiet_s = quiet_s
        self._waiting = {machine.node: machine for machine in machines}
        self._told: dict[str, set[str]] = {node: set() for node in self._waiting}
        """What was said of each."""
        self._heard_at = dict.fromkeys(self._waiting, time.monotonic())

    def until_ready(self) -> dict[str, GpuctlError]:
        """Wait until all are ready; returns ``troubles``."""
        deadline = time.monotonic() + _READY_S
        while self._waiting:
            for node in list(self._waiting):
                self._read_report(node)
            quiet = [n for n in self._waiting if time.monotonic() - self._heard_at[n] > self._quiet_s]
            if quiet:
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    list(pool.map(self._ask, quiet))
            if time.monotonic() > deadline:
                for node in list(self._waiting):
                    self._give_up(node, f"{node} was not ready in {_READY_S:g} s")
            if self._waiting:
                time.sleep(_LOOK_EVERY_S)
        return self.troubles

    def _read_report(self, node: str) -> None:
        key = layout.boot_report(node)
        data = self._bucket.get(key)
        report = decode(data, BootReport, key) if data else None
        if report is None:
            return
        if report.state == "ready":
            del self._waiting[node]
            self._say(f"{node}: ready")
        elif report.state == "failed":
            self._give_up(node, f"{node} did not become a node: {report.step}: {report.reason}")
        else:
            self._tell(node, " ".join(filter(None, (report.step, report.reason))))

    def _ask(self, node: str) -> None:
        """One that the bucket has not heard of for a while: does it still try?"""
        try:
            is_trying, log = self._waiting[node].pulse()
        except MachineRefused as error:
            self._give_up(node, error.message)
            return
        self._heard_at[node] = time.monotonic()
        if is_trying:
            self._tell(node, log)
            return
        self._read_report(node)  # it may have come to its end just now
        if node in self._waiting:
            self._give_up(node, f"{node} ended its boot without reporting to the bucket: {log or 'its log is empty'}")

    def _tell(self, node: str, line: str) -> None:
        if line and line not in self._told[node]:
            self._told[node].add(line)
            self._heard_at[node] = time.monotonic()
            self._say(f"{node}: {line}")

    def _give_up(self, node: str, why: str) -> None:
        del self._waiting[node]
        self.troubles[node] = MachineRefused(why, f"see `gpuctl logs --boot {node}`")
