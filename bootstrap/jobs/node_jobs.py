"""The jobs that a node knows: prepared before a round needs them, and dropped once they are over."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed
from gpuctl.bootstrap.jobs.interpreters import OWN, key_of
from gpuctl.bootstrap.jobs.old_jobs import OldJobs
from gpuctl.bootstrap.jobs.runtimes import Runtimes
from gpuctl.bootstrap.jobs.workspace import JobWorkspace
from gpuctl.bootstrap.mirror.watched_folder import WatchedFolder
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.rounds import Member, Round
from gpuctl.cluster.storage.interface import Store

_TO_COME = "?"
"""An environment's interpreter, while it is not there: the node's own would only take processors from who makes it."""


class NodeJobs:
    """The unfinished jobs on one node, and the folders of all. One thread uses it; another one prepares.

    Args:
        folder: holds each job's folder.
        store: the cluster's bucket.
        runtimes: fetch the images of jobs that have one, make the environments of the others, and import what their
            scripts will.
        on_ready: is called when a job is prepared.
        say: prints a line to the agent's log.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        clock: Clock,
        runtimes: Runtimes,
        on_ready: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._store = store
        self._runtimes = runtimes
        self._needs: dict[str, str] = {}
        """By job, the interpreter that it needs, once that is known and it is there."""
        self._on_ready = on_ready
        self._say = say
        self._workspaces: dict[str, JobWorkspace] = {}
        self._checkpoint_folders: dict[str, WatchedFolder] = {}
        self._old_jobs = OldJobs(folder, store, clock, say)
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="preparer")
        self._prepared: set[str] = set()
        self._preparing = 0
        self._unfinished: frozenset[str] = frozenset()

    @property
    def is_ready(self) -> bool:
        """Whether nothing is being prepared."""
        return self._preparing == 0

    def workspace(self, job: str) -> JobWorkspace:
        if job not in self._workspaces:
            self._workspaces[job] = JobWorkspace(self._store, self._folder / job, job)
        return self._workspaces[job]

    def checkpoint_folder(self, job: str) -> WatchedFolder:
        """The folder of ``$GPUCTL_CHECKPOINT_DIR``, with what is known of its files from earlier rounds."""
        folder = self.workspace(job).folder / "checkpoints"
        return self._checkpoint_folders.setdefault(job, WatchedFolder(folder))

    def remove_leftover_containers(self) -> None:
        """In the background: containers of an agent that died."""
        self._preparer.submit(self._runtimes.containers.sweep)

    def prepare(self, jobs: Mapping[str, Version[Round]]) -> None:
        """Have the code, the packages and the imports of ``jobs``, all that are unfinished, here before a round needs
        them."""
        self._unfinished = frozenset(jobs)
        for job, version in jobs.items():
            if job not in self._prepared:
                self._prepared.add(job)
                self._preparing += 1
                members = version.value.members if version.value else ()
                self._preparer.submit(self._prepare, self.workspace(job), members)

    def interpreters_wanted(self) -> set[str] | None:
        """Keys of those that unfinished jobs need; ``None`` while that is not known. Where there are no such jobs, the
        next one may well need what the last one did."""
        known = {job: self._needs.get(job) for job in self._unfinished}
        return {key for key in known.values() if key is not None} if known and None not in known.values() else None

    def drop_finished(self, busy: Collection[str]) -> None:
        """A job that is over needs no replicas of its checkpoints, and in the end no folder. ``busy``: those that still
        run here."""
        needed = self._unfinished | set(busy)
        over = self._workspaces.keys() - needed
        for job in over:
            self._checkpoint_folders.pop(job, None)
            self._needs.pop(job, None)
            shutil.rmtree(self._workspaces.pop(job).tier, ignore_errors=True)
        self._runtimes.environments.drop_finished(needed)
        self._old_jobs.sweep_soon(needed, has_news=bool(over))

    def _prepare(self, workspace: JobWorkspace, members: tuple[Member, ...]) -> None:
        job = workspace.folder.name

        def is_over() -> bool:
            return job not in self._unfinished

        try:
            spec = workspace.prepare()
            if spec.image:
                self._runtimes.containers.fetch(spec.image, is_over)
            else:
                if spec.environment:
                    self._needs[job] = _TO_COME
                environment = self._runtimes.environments.have(spec, workspace.code, members, is_over)
                self._needs[job] = key_of(environment)
                self._runtimes.interpreters.preload(environment, workspace.imports())
        except EnvironmentFailed as error:
            # No node can run it, so nobody has to wait for its turn to hear of it.
            with contextlib.suppress(GpuctlError):
                workspace.end_as_failed(error)
        except (GpuctlError, OSError) as error:
            self._say(f"cannot prepare {job} yet: {error}")
        finally:
            if self._needs.get(job, _TO_COME) == _TO_COME:
                self._needs[job] = OWN
            self._preparing -= 1
            self._on_ready()
