"""The jobs that a node knows: prepared before a round needs them, and dropped once they are over."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpuctl.bootstrap.jobs.old_jobs import OldJobs
from gpuctl.bootstrap.jobs.workspace import JobWorkspace
from gpuctl.bootstrap.launch.container_runtime import Containers
from gpuctl.bootstrap.launch.interpreter import Interpreter
from gpuctl.bootstrap.mirror.watched_folder import WatchedFolder
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.interface import Store


class NodeJobs:
    """The unfinished jobs on one node, and the folders of all. One thread uses it; another one prepares.

    Args:
        folder: holds each job's folder.
        store: the cluster's bucket.
        containers: fetches the images of jobs that have one.
        on_ready: is called when a job is prepared.
        say: prints a line to the agent's log.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        clock: Clock,
        containers: Containers,
        on_ready: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._store = store
        self._containers = containers
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
        self._preparer.submit(self._containers.sweep)

    def prepare(self, jobs: Collection[str], interpreter: Interpreter) -> None:
        """Have the code and the imports of ``jobs``, all that are unfinished, here before a round needs them."""
        self._unfinished = frozenset(jobs)
        for job in jobs:
            if job not in self._prepared:
                self._prepared.add(job)
                self._preparing += 1
                self._preparer.submit(self._prepare, self.workspace(job), interpreter)

    def drop_finished(self, busy: Collection[str]) -> None:
        """A job that is over needs no replicas of its checkpoints, and in the end no folder. ``busy``: those that still
        run here."""
        needed = self._unfinished | set(busy)
        over = self._workspaces.keys() - needed
        for job in over:
            self._checkpoint_folders.pop(job, None)
            shutil.rmtree(self._workspaces.pop(job).tier, ignore_errors=True)
        self._old_jobs.sweep_soon(needed, has_news=bool(over))

    def _prepare(self, workspace: JobWorkspace, interpreter: Interpreter) -> None:
        job = workspace.folder.name
        try:
            if image := workspace.prepare().image:
                self._containers.fetch(image, lambda: job not in self._unfinished)
            else:
                interpreter.preload(workspace.imports())
        except (GpuctlError, OSError) as error:
            self._say(f"cannot prepare {job} yet: {error}")
        finally:
            self._preparing -= 1
            self._on_ready()
