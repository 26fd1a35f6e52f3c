"""``Checkpointer``: whole-or-absent checkpoints for any PyTorch loop.

::

    checkpointer = Checkpointer(every=100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(checkpointer.restore(state) or 0, steps):
        ...  # one optimizer step
        checkpointer.step(step + 1, state)

A checkpoint is first written, by all ranks in parallel, and then committed by one entry in a ledger: it is there whole
or not at all, and a process of an older round cannot commit any more (see ``storage`` and ``commits``). Where the
position in the data depends on more than the step, put it into the state as well.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Store, open_bucket, probe
from gpuctl.cluster.errors import BadInput, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records import CheckpointEntry
from gpuctl.cluster.worker import WorkerContext
from gpuctl.trainers.commits import Commits
from gpuctl.trainers.notice import Notice
from gpuctl.trainers.state import LoadPlanner, SavePlanner, State
from gpuctl.trainers.storage import BucketReader, BucketWriter, Damaged
from gpuctl.trainers.world import World

T = TypeVar("T")


class Checkpointer:
    """Keeps the last ``keep`` checkpoints of a training run (``None``: all), one ``every`` so many optimizer steps.

    ``url`` is a bucket URL or a local path. By default it is the job's own folder in the cluster's bucket; outside of a
    gpuctl job there is none, and then checkpoints are off: ``restore`` finds nothing and ``save`` does nothing.
    ``store`` takes the place of ``url`` where a program has its own.

    The *state* given to ``restore`` and ``save`` is a dict of models, optimizers, schedulers and other objects with
    ``state_dict`` and ``load_state_dict``, and of plain values. The random number generators of each rank (Python's,
    NumPy's, torch's) are kept besides. A checkpoint of four ranks restores on three, or on one.

    In a world of several ranks the process group must exist before the first call, and every rank makes the same calls.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        every: int | None = None,
        keep: int | None = 3,
        store: Store | None = None,
    ) -> None:
        for name, number in (("every", every), ("keep", keep)):
            if number is not None and number < 1:
                raise BadInput(f"{name}={number} is not a number of steps or checkpoints", "use 1 or more")
        self._context = WorkerContext.from_env()
        self._own = url is None and store is None
        self._every = every
        self._keep = keep
        self._store = store or _open(url, self._context)
        self._commits: Commits | None = None
        self._group: dist.ProcessGroup | None = None
        self._round: int | None = None
        self._kept_step: int | None = None
        self._notice = Notice()
        if self.on:
            self._notice.listen()

    @property
    def on(self) -> bool:
        """Whether there is a place for checkpoints."""
        return self._store is not None

    def restore(self, state: State) -> int | None:
        """Load the newest checkpoint that is whole into ``state`` (objects in place, plain values by assignment) and
        return its step; ``None`` if there is none.

        A damaged checkpoint is passed over for the one before, with a line on stderr. Raises ``BadInput`` for a
        checkpoint of another model before anything is loaded, and ``Damaged`` if there are checkpoints but none is
        whole.
        """
        if self._store is None:
            return None
        entries = self._begin(self._store)
        for entry in reversed(entries):
            try:
                self._load(self._store, entry, state)
            except Damaged as damaged:
                if World.now().rank == 0:
                    print(f"gpuctl: checkpoint of step {entry.step} is damaged: {damaged}", file=sys.stderr)
                continue
            self._kept_step = entry.step
            return entry.step
        if entries:
            raise Damaged(
                f"none of the {len(entries)} checkpoints is whole", "delete them (gpuctl ckpt rm) to begin anew"
            )
        return None

    def step(self, step: int, state: State) -> None:
        """Call it after each optimizer step, with the number of steps done: saves when one is due; and when this
        machine is about to be taken, saves at a step that all ranks agree on, and ends the process with code 0."""
        if self.should_stop(step):
            self.save(step, state)
            self.leave()
        if self._every is not None and step % self._every == 0:
            self.save(step, state)

    def save(self, step: int, state: State) -> None:
        """Write and commit a checkpoint of ``state`` after ``step`` optimizer steps. A step that this round has already
        saved or restored is not written again.

        Raises ``Fenced`` if a newer round has begun.
        """
        if self._store is None or step == self._kept_step:
            return
        if self._round is None:
            self._begin(self._store)
        self._write(self._store, step, state)
        self._kept_step = step
        self._tidy()

    def should_stop(self, step: int) -> bool:
        """Whether to save now (``step`` steps are done) and ``leave``, because this process was asked to stop: ``True``
        at the same step on every rank. Call it once between any two optimizer steps; it costs nothing undisturbed.

        The steps must be in lock step, as with DDP: no rank finishes a step that another has not begun.
        """
        return self._notice.should_stop(step)

    def leave(self) -> None:
        """End this process with exit code 0, once all ranks are here. Raises ``SystemExit``."""
        if World.now().size > 1:
            dist.barrier(group=self._group)
        self._notice.drained()
        raise SystemExit(0)

    def _begin(self, store: Store) -> tuple[CheckpointEntry, ...]:
        """Raise the fence, and agree on this round's number and on what there is to restore."""
        world = World.now()
        if world.size > 1 and self._group is None:
            # A gloo group of its own: NCCL takes no objects from the host, and the default group is the training's.
            self._group = dist.new_group(backend="gloo")
        if self._commits is None and world.rank == 0:
            number = self._context.round if self._own and self._context is not None else None
            self._commits = Commits(store, number, self._keep)
        self._round, entries = self._on_rank0(Commits.begin)
        return entries

    def _load(self, store: Store, entry: CheckpointEntry, state: State) -> None:
        world = World.now()
        reader = BucketReader(store, entry)
        planner = LoadPlanner(state, reader, world.rank)
        with _in_our_words():
            dcp.load({}, storage_reader=reader, planner=planner, process_group=self._group, no_dist=world.size == 1)
        planner.finish()

    def _write(self, store: Store, step: int, state: State) -> None:
        world = World.now()
        path = f"{step}-r{self._round}"
        planner = SavePlanner(state, world.rank)

        def commit(size: int, digests: dict[str, str]) -> None:
            assert self._commits is not None, "only rank 0 commits"
            self._commits.commit(step, path, size, digests, world.size)

        with _in_our_words():
            dcp.save(
                planner.flat,
                storage_writer=BucketWriter(store, path, world.rank, commit),
                planner=planner,
                process_group=self._group,
                no_dist=world.size == 1,
            )

    def _tidy(self) -> None:
        """The checkpoint is committed: that old ones cannot be deleted now is worth a line, and no job's end."""
        try:
            if self._commits is not None:
                self._commits.tidy()
        except (StoreError, StoreUnavailable) as error:
            print(f"gpuctl: old checkpoints could not be deleted yet: {error}", file=sys.stderr)

    def _on_rank0(self, call: Callable[[Commits], T]) -> T:
        """What ``call`` returns on rank 0, or raises there, on every rank."""
        answer: list[object] = [None]
        if self._commits is not None:
            try:
                answer = [call(self._commits)]
            except GpuctlError as error:
                answer = [error]
        if World.now().size > 1:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        if isinstance(answer[0], GpuctlError):
            raise answer[0]
        return answer[0]  # type: ignore[return-value]


def _open(url: str | None, context: WorkerContext | None) -> Store | None:
    """The folder of the checkpoints: the job's own by default, in a bucket that the cluster has proven already."""
    if url is not None:
        bucket = open_bucket(url if "://" in url else Path(url).absolute().as_uri())
        if World.of_env().rank == 0:
            probe(bucket)
        return bucket
    return open_bucket(context.bucket).at(layout.checkpoints(context.job)) if context is not None else None


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Torch's collective error as the first rank's own, and no warning about a world of one. A ``Damaged`` gives way to
    any other: it would only lead to an older checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as failure:
            errors = [error for _, (error, _) in sorted(failure.failures.items(), key=lambda item: item[0])]
            raise min(errors, key=lambda error: isinstance(error, Damaged)) from failure
