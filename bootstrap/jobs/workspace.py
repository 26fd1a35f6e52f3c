"""A job's files on a node: its code, unpacked once, and the folders its workers write to."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.jobs.code_archive import unpack
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.storage.interface import Store
from gpuctl.cluster.worker_context import STRATEGY, STRATEGY_READ
from gpuctl.trainers.launchers.adapter import named, stop_signal
from gpuctl.trainers.launchers.preload import imports_of
from gpuctl.trainers.launchers.torchrun import TORCHRUN

_EACH_JOBS_OWN = (STRATEGY, "GPUCTL_LAUNCHER")
"""A local node has the variables of whoever started it, and these would be for every job."""


class JobWorkspace:
    """A job's folder on this node, ``<node dir>/jobs/<job>``. Thread-safe: whoever comes second to ``prepare`` waits
    for the first."""

    def __init__(self, store: Store, folder: Path, job: str) -> None:
        self.folder = folder
        self.code = folder / "code"
        self.tier = folder / "tier"
        """Copies of the last checkpoint (see ``cluster.checkpoints.replica_layout``)."""
        self._store = store
        self._job = job
        self._lock = threading.Lock()
        self._spec: JobSpec | None = None

    @property
    def spec(self) -> JobSpec:
        """The job's spec; only after ``prepare``."""
        assert self._spec is not None
        return self._spec

    def prepare(self) -> JobSpec:
        """Fetch and unpack what is not there yet.

        Raises ``GpuctlError`` if the bucket does not have it, ``StoreUnavailable`` if it does not answer.
        """
        with self._lock:
            if self._spec is None:
                key = layout.job_spec(self._job)
                spec = decode(self._get(key), JobSpec, key)
                if not self.code.exists():
                    partial = self.folder / "code.partial"
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
                    unpack(self._get(layout.code(spec.code)), partial, spec.code)
                    partial.rename(self.code)
                self._spec = spec
            return self._spec

    def end_as_failed(self, error: GpuctlError) -> None:
        """End a job that no node can ever run, whoever leads. Raises as the bucket does."""
        queue.end_as_failed(self._store, self._job, error.message, error.hint)

    @property
    def program(self) -> str:
        """The script; with ``exec`` it may be a program of the node's instead. Only after ``prepare``."""
        path = self.code / self.spec.script
        return str(path) if path.exists() else self.spec.script

    @property
    def stop_signal(self) -> int:
        """By which signal the job's workers are asked to stop; there are none before ``prepare``."""
        return stop_signal(named(self._spec.launcher), self._spec.env) if self._spec else signal.SIGTERM

    def imports(self) -> list[str]:
        """What the script will import, for the warm interpreter. Only after ``prepare``."""
        if self.spec.launcher != TORCHRUN:
            return []  # its workers begin anew
        return imports_of(self.code / self.spec.script, self.code)

    def worker_env(self, node_env: Mapping[str, str]) -> dict[str, str]:
        """The variables of the node and, before them, of the job. Only after ``prepare``."""
        inherited = {name: value for name, value in node_env.items() if name not in _EACH_JOBS_OWN}
        chosen = {STRATEGY: self.spec.strategy} if self.spec.strategy else {}
        return {**inherited, **self.spec.env, **chosen}

    def unused_strategy(self, number: int) -> str:
        """What to tell the user if no worker of round ``number`` on this node made anything of ``--strategy``; empty if
        one did, or if there was none. Only after ``prepare``."""
        if not self.spec.strategy or (self.round_dir(number) / STRATEGY_READ).exists():
            return ""
        return f"--strategy {self.spec.strategy} had no effect: the script makes no gpuctl.Trainer"

    def round_dir(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:06d}"

    def _get(self, key: str) -> bytes:
        data = self._store.get(key)
        if data is None:
            raise GpuctlError(f"the bucket has no {key}", "submit the job again")
        return data
