"""``Checkpointer``: whole-or-absent checkpoints for any PyTorch loop, at the price of a copy to host memory.

::

    checkpointer = Checkpointer(every=100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(checkpointer.restore(state) or 0, steps):
        ...  # one optimizer step
        checkpointer.step(step + 1, state)
    checkpointer.wait()

A save copies this rank's share to host memory and returns; all ranks upload in parallel while the training goes on, and
then one entry in a ledger commits it. So a checkpoint is there whole or not at all, and a process of an older round
cannot commit any more (see ``saving`` and ``gpuctl.cluster.commits``). Where the position in the data depends on more
than the step, put it into the state as well.
"""

from __future__ import annotations

import contextlib
import operator
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import xxhash

from gpuctl.cluster import jobs
from gpuctl.cluster.bucket import PartStore, open_bucket, probe
from gpuctl.cluster.commits import Commits
from gpuctl.cluster.errors import BadInput, Damaged, Fenced, GpuctlError
from gpuctl.cluster.manifest import Manifest, read_manifest
from gpuctl.cluster.records import CheckpointEntry
from gpuctl.cluster.retention import Retention
from gpuctl.cluster.worker import WorkerContext
from gpuctl.trainers import reading
from gpuctl.trainers.deadline import CHOICES, choose
from gpuctl.trainers.interval import Interval, Losses
from gpuctl.trainers.notice import Notice
from gpuctl.trainers.places import folder_at, own_folder
from gpuctl.trainers.reading import BucketSource, Parts, read_value
from gpuctl.trainers.saving import Reason, Save, Saver, say
from gpuctl.trainers.shares import Holders, Share, held_of, holders_of, outline, share_of
from gpuctl.trainers.staging import Staging, lay
from gpuctl.trainers.state import Contents, State, Targets, contents_of
from gpuctl.trainers.tiers import Tiers
from gpuctl.trainers.uploading import Limits, Uploader
from gpuctl.trainers.world import World

T = TypeVar("T")

_BUFFERS = 2


class Checkpointer:
    """Keeps checkpoints of a training run, one ``every`` so many optimizer steps; ``"auto"`` finds out how many are
    best, and says why (see ``interval``).

    ``url`` is a bucket URL or a local path. By default it is the job's own folder in the cluster's bucket; outside of a
    gpuctl job there is none, and then checkpoints are off: ``restore`` finds nothing and ``save`` does nothing.
    ``store`` takes the place of ``url`` where a program has its own.

    ``keep`` is how many stay (``None``: all), or a ``Retention``. If one is still being uploaded when the next is due,
    that one is skipped or waits for a second host buffer, as ``when_busy`` says; ``skipped`` counts. ``limits`` bounds
    what uploads and restores take of the machine.

    The *state* given to ``restore`` and ``save`` is a dict of models, optimizers, schedulers and other objects with
    ``state_dict`` and ``load_state_dict``, and of plain values. The random number generators of each rank (Python's,
    NumPy's, torch's) are kept besides. A checkpoint of four ranks restores on three, or on one, whether they hold whole
    parameters (DDP) or shards (FSDP2).

    In a world of several ranks the process group must exist before the first call, and every rank makes the same calls.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        every: int | Literal["auto"] | None = None,
        keep: int | Retention | None = 3,
        when_busy: Literal["skip", "wait"] = "skip",
        limits: Limits | None = None,
        store: PartStore | None = None,
    ) -> None:
        if not (every is None or every == "auto" or (isinstance(every, int) and every >= 1)):
            raise BadInput(f"every={every!r} is not a number of steps", "use 1 or more, or 'auto'")
        if when_busy not in ("skip", "wait"):
            raise BadInput(f"when_busy={when_busy!r} is no policy", "use 'skip' or 'wait'")
        self._context = WorkerContext.from_env()
        self._own = url is None and store is None
        self._losses = Losses()
        self._interval = Interval(every, lambda: self._losses)
        self._said_steps = 0
        self._retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        self._when_busy = when_busy
        self._limits = limits or Limits()
        self._store = store or _open(url, self._context)
        self._group: dist.ProcessGroup | None = None
        self._commits: Commits | None = None
        self._saver: Saver | None = None
        self._tiers: Tiers | None = None
        self._buffers = [Staging() for _ in range(_BUFFERS)]
        self._shares: dict[str, Share] = {}
        self._kept_step: int | None = None
        self._newest: Save | None = None
        self._prepared = False
        self._notice = Notice()
        self.skipped = 0
        """Saves that were due while another one was on its way."""
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
        if self._saver is not None:
            self._saver.rest()
        entries = self._begin(self._store)
        for entry in reversed(entries):
            try:
                self._load(self._store, entry, state)
            except Damaged as damaged:
                if World.now().rank == 0:
                    say(f"checkpoint of step {entry.step} is damaged: {damaged}")
                continue
            self._kept_step = entry.step
            return entry.step
        if entries:
            raise Damaged(
                f"none of the {len(entries)} checkpoints is whole", "delete them (gpuctl ckpt rm) to begin anew"
            )
        return None

    def step(self, step: int, state: State, metrics: Mapping[str, float] | None = None) -> None:
        """Call it after each optimizer step, with the number of steps done: saves when one is due; and when this
        machine is about to be taken, saves at a step that all ranks agree on, and ends the process with code 0.

        ``metrics`` are kept with the checkpoint, for ``Retention.best``: numbers, or tensors and arrays of one. Raises
        what ``should_stop`` and ``save`` do.
        """
        if self.should_stop(step):
            self._save_in_time(step, state, metrics)
            self.leave()
        if not self._prepared and self.on and self._interval.on:
            self._prepare(state)
        if self._interval.is_due(step):
            self._save(step, state, "interval", metrics)

    def save(self, step: int, state: State, metrics: Mapping[str, float] | None = None) -> None:
        """Save ``state`` after ``step`` optimizer steps: returns when it is copied to host memory, and nothing that
        happens to ``state`` from then on is in the checkpoint. It is committed some time later (``wait``).

        A step that this round has already saved or restored is not written again. Raises ``BadInput`` for a state that
        cannot be kept, or a metric that is no number, and ``Fenced`` if a newer round has begun.
        """
        self._save(step, state, "asked", metrics)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until what was saved is committed and, without a ``timeout_s``, what it replaced is deleted. A process also
        waits for that when it ends; but only here the script hears of it. Otherwise a line tells of what has failed.

        Raises ``Fenced`` or another ``GpuctlError`` if the newest save failed, ``TimeoutError``.
        """
        newest, saver = self._newest, self._saver
        if newest is None or saver is None:
            return
        if not newest.done.wait(timeout_s):
            raise TimeoutError(f"the checkpoint of step {newest.step} is not committed after {timeout_s:g} s")
        saver.heard()
        if newest.error is not None:
            raise newest.error
        if timeout_s is None:
            saver.rest()
        if saver.died_of is not None:
            raise saver.died_of

    def should_stop(self, step: int) -> bool:
        """Whether to save now (``step`` steps are done) and ``leave``, because this process was asked to stop: ``True``
        at the same step on every rank. Call it once between any two optimizer steps; it costs nothing undisturbed.

        The steps must be in lock step, as with DDP: no rank finishes a step that another has not begun. Raises
        ``Fenced`` if a newer round has begun, and ``GpuctlError`` if the bucket has refused a checkpoint.
        """
        if self._saver is not None and self._saver.ended_by is not None:
            self._saver.heard()
            raise self._saver.ended_by
        return self._notice.should_stop(step)

    def leave(self) -> None:
        """End this process with exit code 0, once what was saved is committed on all ranks. Raises ``SystemExit``."""
        deadline = self._hurry()
        try:
            self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except (GpuctlError, TimeoutError) as error:
            if isinstance(error, Fenced):
                raise
            say(f"leaving without a last checkpoint: {error}")
        if World.now().size > 1:
            dist.barrier(group=self._group)
        self._notice.drained()
        raise SystemExit(0)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save(
        self,
        step: int,
        state: State,
        reason: Reason,
        metrics: Mapping[str, float] | None,
        deadline: float | None = None,
    ) -> None:
        if self._store is None:
            return
        step, numbers = _count(step), _numbers(metrics or {})
        if self._is_kept(step):
            return
        if self._saver is None:
            self._begin(self._store)
        assert self._saver is not None
        if self._saver.died_of is not None:
            raise self._saver.died_of
        begun = time.monotonic()
        if (last := self._newest) is not None and last.entry is not None:
            self._interval.committed(last.entry.took_s)
        proposed = self._interval.propose(step) if World.now().rank == 0 else 0
        contents, share, busiest, following = self._agree(step, state, len(self._saver.in_flight()), proposed)
        self._interval.agreed(following)
        if busiest and reason == "interval" and self._when_busy == "skip":
            self.skipped += 1
            return
        laid = lay(share, contents.values)
        staging = self._free_buffer(self._saver)
        save = Save(
            step=step,
            reason=reason,
            share=share,
            laid=laid,
            data=staging.fill(laid, contents),
            staging=staging,
            metrics=numbers,
            deadline=deadline,
            begun=begun,
        )
        self._saver.submit(save)
        self._kept_step = step
        self._newest = save
        self._interval.saved(step, time.monotonic() - begun)
        self._say_interval()

    def _save_in_time(self, step: int, state: State, metrics: Mapping[str, float] | None) -> None:
        """The last checkpoint that can still be had (see ``deadline``). Rank 0 decides for all."""
        deadline, flying, usual_s = self._hurry(), [], None
        if self._saver is not None:
            flying, usual_s = self._saver.in_flight(), self._saver.took_s
        if usual_s is None and flying:
            usual_s = flying[0].in_all_s()
        left_s = None if deadline is None else deadline - time.monotonic()
        choice = choose(left_s, usual_s, [save.remaining_s(usual_s) for save in flying])
        if World.now().size > 1 and self._saver is not None:
            told = torch.tensor([CHOICES.index(choice)])
            dist.broadcast(told, 0, group=self._group)
            choice = CHOICES[int(told)]
        if choice == "flying":
            say(f"{left_s or 0:.1f} s are left, so the checkpoint on its way is finished, and none of step {step} made")
            return
        if choice == "new":
            for save in flying:
                save.called_off.set()
        self._save(step, state, "notice", metrics, deadline)

    def _hurry(self) -> float | None:
        """The deadline. Where there is one, no time is left for deleting old checkpoints."""
        deadline = self._notice.deadline()
        if deadline is not None and self._saver is not None:
            self._saver.hurry()
        return deadline

    def _say_interval(self) -> None:
        """On rank 0, when it differs by a quarter from what was said last."""
        plan = self._interval.plan
        if plan is not None and abs(plan.steps - self._said_steps) > 0.25 * self._said_steps:
            self._said_steps = plan.steps
            say(f"a checkpoint every {plan.steps} steps: {plan.why}")

    def _read_losses(self, context: WorkerContext) -> None:
        """Of this job so far. Another one would be another round's."""
        with contextlib.suppress(GpuctlError):
            history = jobs.rounds(open_bucket(context.bucket), context.job).history()
            self._losses = Losses.of((version.value for version in history if version.value), time.time())

    def _is_kept(self, step: int) -> bool:
        """Whether this round has restored or saved ``step``. If that save is on its way, its end says; on all ranks the
        same, so that none of them begins a save that the others do not."""
        if step != self._kept_step:
            return False
        if self._newest is None or self._newest.step != step:
            return True
        self._newest.done.wait()
        return self._newest.error is None

    def _agree(self, step: int, state: State, busy: int, following: int) -> tuple[Contents, Share, int, int]:
        """What this rank holds, its share of that, the largest number of saves that a rank has on its way, and
        ``following`` as rank 0 has it.

        One small exchange tells whether all ranks hold the same; only if they do not, they tell each other what they
        hold. Raises ``BadInput`` if a rank cannot keep its state, or they save different steps.
        """
        world = World.now()
        contents, refused = Contents({}, set(), set(), {}), None
        try:
            contents = contents_of(state, world.rank)
        except BadInput as error:
            refused = error
        text = outline(contents)
        told = torch.tensor([-1 if refused else step, busy, xxhash.xxh3_64_intdigest(text.encode()) >> 1, following])
        everyone = [told]
        if world.size > 1:
            everyone = [torch.empty_like(told) for _ in range(world.size)]
            dist.all_gather(everyone, told, group=self._group)
        steps, busiest, outlines = ([int(of[i]) for of in everyone] for i in range(3))
        if refused:
            raise refused
        if set(steps) != {step}:
            raise BadInput(f"the ranks save different steps: {steps}", "-1 is one that could not; see its own error")
        alike = len(set(outlines)) == 1
        if not alike:  # and not kept: the next save may find them alike
            share = share_of(contents, world.rank, world.size, self._holders(contents))
        else:
            if text not in self._shares:
                self._shares = {text: share_of(contents, world.rank, world.size)}
            share = self._shares[text]
        return contents, share, max(busiest), int(everyone[0][3])

    def _holders(self, contents: Contents) -> Holders:
        told = [held_of(contents)] * World.now().size
        dist.all_gather_object(told, told[0], group=self._group)
        return holders_of(told)

    def _prepare(self, state: State) -> None:
        """Have a host buffer ready, so that the first save costs no more than the others."""
        self._prepared = True
        world = World.now()
        contents = contents_of(state, world.rank)
        share = share_of(contents, world.rank, world.size)
        self._buffers[0].prepare(lay(share, contents.values).size)

    def _free_buffer(self, saver: Saver) -> Staging:
        """One that no save is using. With both in use, the older save is waited for."""
        while True:
            saves = saver.in_flight()
            taken = {id(save.staging) for save in saves}
            for buffer in self._buffers:
                if id(buffer) not in taken:
                    return buffer
            saves[0].done.wait()

    # -- restoring ----------------------------------------------------------------------------------------------------

    def _begin(self, store: PartStore) -> tuple[CheckpointEntry, ...]:
        """Raise the fence, and agree on this round's number and on what there is to restore."""
        world = World.now()
        if world.size > 1 and self._group is None:
            # A gloo group of its own: NCCL takes no objects from the host, and the default group is the training's.
            self._group = dist.new_group(backend="gloo")
        if self._commits is None and world.rank == 0:
            number = self._context.round if self._own and self._context is not None else None
            self._commits = Commits(store, number, self._retention)
            if self._interval.is_auto and self._context is not None:
                threading.Thread(target=self._read_losses, args=(self._context,), daemon=True).start()
        number, entries, mark = self._on_rank0(lambda commits: (*commits.begin(), secrets.token_hex(2)))
        if self._saver is None:
            if self._own and self._context is not None:
                self._tiers = Tiers.of(self._context, say)
            self._saver = Saver(number, mark, self._commits, Uploader(store, self._limits), self._tiers)
        return entries

    def _load(self, store: PartStore, entry: CheckpointEntry, state: State) -> None:
        """Raises, on every rank, what it raised on any; ``Damaged`` gives way to any other error."""
        rank = World.now().rank
        parts = Parts([*(self._tiers.sources(entry) if self._tiers else []), BucketSource(store)])
        loading: list[tuple[Manifest, Targets]] = []

        def plan() -> None:
            manifest = read_manifest(store, entry)
            targets = Targets(state, manifest, entry.path, rank, lambda name: read_value(manifest, name, parts))
            loading.append((manifest, targets))

        self._together(plan)
        ((manifest, targets),) = loading
        threads = self._limits.reads(max((part.size for part in manifest.parts), default=0))
        self._together(lambda: reading.load(manifest, targets.items(), targets.box, parts, threads))
        targets.finish()
        assert self._saver is not None
        self._saver.based_on(entry, manifest)
        if self._tiers is not None:
            say(f"step {entry.step} is restored: {parts.told()}")

    def _together(self, call: Callable[[], None]) -> None:
        """``call`` on every rank; if it raised on one, that error is raised on all."""
        raised: list[Exception | None] = [None]
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below, here or from another rank
            raised = [error]
        world = World.now()
        told: list[Exception | None] = raised * world.size
        if world.size > 1:
            dist.all_gather_object(told, raised[0], group=self._group)
        errors = [error for error in told if error is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Damaged)) from raised[0]

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


def _count(step: int) -> int:
    """Of Python's own kind: NumPy's, say, is not JSON."""
    try:
        return operator.index(step)
    except TypeError as error:
        raise BadInput(f"step={step!r} is not a number of optimizer steps", "use an int") from error


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError) as error:
            raise BadInput(f"metrics[{name!r}] is not a number but {value!r}", "give a float") from error
    return found


def _open(url: str | None, context: WorkerContext | None) -> PartStore | None:
    """The folder of the checkpoints: the job's own by default."""
    if url is not None:
        bucket = folder_at(url)
        if World.of_env().rank == 0:
            probe(bucket)
        return bucket
    return None if context is None else own_folder(context)
