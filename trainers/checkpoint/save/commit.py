"""The last part of a save, by whichever way it was written: one entry in the job's log, and what is told of trouble."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from gpuctl.cluster.checkpoints.manifest import Manifest
from gpuctl.cluster.errors import Damaged, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records.checkpoints import CheckpointEntry, SaveReason
from gpuctl.trainers.console import say


def entry_of(
    manifest: Manifest,
    path: str,
    *,
    step: int,
    round_number: int,
    world: int,
    metrics: Mapping[str, float],
    reason: SaveReason = "asked",
) -> CheckpointEntry:
    """The log's entry of a checkpoint in the folder ``path``, all parts of which are in the bucket.

    Args:
        manifest: Of all ranks.
        path: Key prefix, without a slash at its end. Parts elsewhere belong to earlier checkpoints.
        step: Optimizer steps done.
        round_number: In which it was written.
        world: How many ranks wrote it.
        metrics: By which a retention may choose the best.
        reason: What caused it.
    """
    return CheckpointEntry(
        step=step,
        round=round_number,
        path=path,
        digest="",  # the commit writes the manifest, and fills it in
        bytes=sum(part.size for part in manifest.parts),
        written=sum(part.size for part in manifest.parts if part.key.startswith(f"{path}/")),
        world=world,
        metrics=dict(metrics),
        reason=reason,
        nodes=tuple(sorted({node for part in manifest.parts for node in part.nodes})),
    )


def timed(entry: CheckpointEntry, begun: float, deadline: float | None = None) -> CheckpointEntry:
    """``entry`` as it is committed now; ``begun`` and ``deadline`` are on the monotonic clock."""
    now = time.monotonic()
    left_s = None if deadline is None else round(deadline - now, 3)
    return replace(entry, at=time.time(), took_s=round(now - begun, 3), left_s=left_s)


def collect_garbage(delete_unneeded: Callable[[], None]) -> None:
    """The checkpoint is committed: that old ones cannot be deleted now is worth a line, and no job's end."""
    try:
        delete_unneeded()
    except (StoreError, StoreUnavailable, Damaged) as error:
        say(f"old checkpoints could not be deleted yet: {error}")


class Waiting:
    """Prints once that a save has to wait for the bucket."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._said = False

    def tell(self, error: GpuctlError) -> None:
        if not self._said:
            self._said = True
            say(f"the checkpoint of step {self._step} has to wait: {error}")
