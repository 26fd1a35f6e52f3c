"""One rank's saves in one round: what the ranks agree on, the copy, and what becomes of it."""

from __future__ import annotations

import time
from typing import Literal

from gpuctl.cluster.checkpoints.manifest import Manifest
from gpuctl.cluster.records.checkpoints import CheckpointEntry, SaveReason
from gpuctl.trainers.checkpoint.ranks import Ranks
from gpuctl.trainers.checkpoint.save.host_buffer import HostBuffer, HostBuffers, layout_of
from gpuctl.trainers.checkpoint.save.last_save import CHOICES, choose
from gpuctl.trainers.checkpoint.save.pending_save import PendingSave
from gpuctl.trainers.checkpoint.save.save_thread import SaveThread
from gpuctl.trainers.checkpoint.save.schedule import SaveSchedule
from gpuctl.trainers.checkpoint.save_plan import SavePlanner
from gpuctl.trainers.checkpoint.state.state_tensors import State
from gpuctl.trainers.console import say
from gpuctl.trainers.world import World


class RoundSaves:
    """Saves and waits for saves. All ranks make the same calls in the same order.

    Args:
        thread: uploads and commits in the background.
        ranks: all ranks of the round.
        buffers: host memory for saves on their way.
        schedule: is told of each save, and proposes the next.
        when_busy: whether a save that is due while another is on its way is skipped, or waits for a second buffer.
    """

    def __init__(
        self,
        thread: SaveThread,
        ranks: Ranks,
        buffers: HostBuffers,
        schedule: SaveSchedule,
        when_busy: Literal["skip", "wait"],
    ) -> None:
        self._thread = thread
        self._ranks = ranks
        self._planner = SavePlanner(ranks)
        self._buffers = buffers
        self._schedule = schedule
        self._when_busy = when_busy
        self._kept_step: int | None = None
        self._newest: PendingSave | None = None
        self.skipped = 0

    def restored(self, entry: CheckpointEntry, manifest: Manifest) -> None:
        """Note that the state is that of ``entry``: the next save need not repeat what it holds."""
        self._thread.based_on(entry, manifest)
        self._schedule.begin(entry.step)
        self._kept_step = entry.step

    def save(
        self, step: int, state: State, reason: SaveReason, metrics: dict[str, float], deadline: float | None = None
    ) -> None:
        """See ``Checkpointer.save``. ``deadline``: when the machine is taken, on the monotonic clock."""
        if self._is_kept(step):
            return
        if self._thread.died_of is not None:
            raise self._thread.died_of
        begun = time.monotonic()
        if (last := self._newest) is not None and last.entry is not None:
            self._schedule.committed(last.entry.took_s)
        proposed = self._schedule.propose(step) if World.now().rank == 0 else 0
        plan = self._planner.plan(step, state, in_flight=len(self._thread.in_flight()), next_step=proposed)
        self._schedule.agreed(plan.next_step)
        if plan.in_flight and reason == "interval" and self._when_busy == "skip":
            self.skipped += 1
            return
        layout = layout_of(plan.partition, plan.contents.values)
        buffer = self._free_buffer()
        save = PendingSave(
            step=step,
            reason=reason,
            share=plan.partition,
            layout=layout,
            data=buffer.fill(layout, plan.contents),
            buffer=buffer,
            metrics=metrics,
            deadline=deadline,
            begun=begun,
        )
        self._thread.submit(save)
        self._kept_step = step
        self._newest = save
        self._schedule.saved(step, time.monotonic() - begun)
        if (cadence := self._schedule.changed()) is not None:
            say(f"a checkpoint every {cadence.steps} steps: {cadence.why}")

    def save_in_time(self, step: int, state: State, metrics: dict[str, float], deadline: float | None) -> None:
        """Save the last checkpoint that can still be had (see ``last_save``). Rank 0 decides for all."""
        in_flight, usual_s = self._thread.in_flight(), self._thread.took_s
        if usual_s is None and in_flight:
            usual_s = in_flight[0].in_all_s()
        left_s = None if deadline is None else deadline - time.monotonic()
        choice = choose(left_s, usual_s, [save.remaining_s(usual_s) for save in in_flight])
        choice = CHOICES[self._ranks.number_of_rank0(CHOICES.index(choice))]
        if choice == "finish":
            say(f"{left_s or 0:.1f} s are left: finishing the checkpoint under way, and making none of step {step}")
            return
        if choice == "new":
            for save in in_flight:
                save.cancelled.set()
        self.save(step, state, "notice", metrics, deadline)

    def wait(self, timeout_s: float | None) -> None:
        """See ``Checkpointer.wait``."""
        newest = self._newest
        if newest is None:
            return
        if not newest.done.wait(timeout_s):
            raise TimeoutError(f"the checkpoint of step {newest.step} is not committed after {timeout_s:g} s")
        self._thread.heard()
        if newest.error is not None:
            raise newest.error
        if timeout_s is None:
            self._thread.rest()
        if self._thread.died_of is not None:
            raise self._thread.died_of

    def rest(self) -> None:
        """Wait until nothing is on its way."""
        self._thread.rest()

    def hurry(self) -> None:
        """Delete no old checkpoints any more: there is no time left for that."""
        self._thread.hurry()

    def raise_if_ended(self) -> None:
        """Raise what made further saves impossible: ``Fenced``, or a bucket that refused a checkpoint."""
        if self._thread.ended_by is not None:
            self._thread.heard()
            raise self._thread.ended_by

    def _is_kept(self, step: int) -> bool:
        """Whether this round has restored or saved ``step``. If that save is on its way, its end says; on all ranks the
        same, so that none of them begins a save that the others do not."""
        if step != self._kept_step:
            return False
        if self._newest is None or self._newest.step != step:
            return True
        self._newest.done.wait()
        return self._newest.error is None

    def _free_buffer(self) -> HostBuffer:
        """One that no save is using. With all in use, the oldest save is waited for."""
        while True:
            saves = self._thread.in_flight()
            if (free := self._buffers.other_than([save.buffer for save in saves])) is not None:
                return free
            saves[0].done.wait()
