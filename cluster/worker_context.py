"""The contract between a node's agent and the worker processes it starts: environment variables and a folder.

Besides what torchrun sets (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` …) a worker finds:

=========================  ==========================================================================================
``GPUCTL_CLUSTER``         name of the cluster
``GPUCTL_BUCKET``          URL of the cluster's prefix in its bucket (see ``bucket.open_bucket``)
``GPUCTL_JOB``             id of the job, such as ``digits-3``
``GPUCTL_ROUND``           number of the round: the fence for all that is written for keeps
``GPUCTL_NODE``            name of the node
``GPUCTL_ROUND_DIR``       a folder of this node and round; what the agent reads in it is listed below
``GPUCTL_CHECKPOINT_DIR``  files written here are kept in the bucket, and are back on every node when a round starts
``GPUCTL_TENSORBOARD_DIR`` event files written here are copied to the bucket
``GPUCTL_STRATEGY``        what ``--strategy`` named (see ``cluster.jobs.strategy``); not set if it was not given
=========================  ==========================================================================================

In ``GPUCTL_ROUND_DIR``:

- ``progress``: one JSON line (``{"step": 12, "loss": 0.3, "steps_per_s": 80.1, "at": …}``), overwritten in place by the
  worker with local rank 0 after each optimizer step.
- ``metrics.jsonl``: one JSON line per record, appended with one ``write`` each by global rank 0.
- ``aware.<local_rank>``: this worker writes its last checkpoint itself when it gets SIGTERM.
- ``deadline``: written by the agent before it asks the workers to stop: when it will kill them, in seconds on this
  machine's monotonic clock.
- ``tiers``: written by the agent before the workers start: where nearer copies of the last checkpoint are and go (see
  ``checkpoints.replica_layout``).
- ``lost.<mark>``: one line: why the newest checkpoint is not in the bucket. Rank 0 writes it, and removes it once a
  later checkpoint is.
- ``drained.<local_rank>``: it did so, and its exit code 0 does not mean that the training is over.
- ``strategy``: made by a worker that has read ``GPUCTL_STRATEGY``.

What a worker prints, to stdout and stderr, goes into one file, in the order in which it was written. Lines that Python
wrote to stderr begin with ``STDERR_MARK``, which terminals do not show; those of native code and of child processes
have none, so they count as stdout.

A worker is asked to stop (a notice, a changed world, a cancelled job) by SIGTERM, and is killed when the time is up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRESS = "progress"
METRICS = "metrics.jsonl"
AWARE = "aware"
DRAINED = "drained"
LOST = "lost"
DEADLINE = "deadline"
TIERS = "tiers"
STRATEGY_READ = "strategy"
STRATEGY = "GPUCTL_STRATEGY"
"""A variable. The other words here are names of files."""
STDERR_MARK = b"\x1b_e\x1b\\"
"""An "application program command" (ECMA-48), which no terminal and hardly any program knows."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's place in its job, as gpuctl tells it by environment variables."""

    cluster: str
    bucket: str
    job: str
    round: int
    node: str
    round_dir: Path
    checkpoint_dir: Path
    tensorboard_dir: Path

    def env(self) -> dict[str, str]:
        return {
            "GPUCTL_CLUSTER": self.cluster,
            "GPUCTL_BUCKET": self.bucket,
            "GPUCTL_JOB": self.job,
            "GPUCTL_ROUND": str(self.round),
            "GPUCTL_NODE": self.node,
            "GPUCTL_ROUND_DIR": str(self.round_dir),
            "GPUCTL_CHECKPOINT_DIR": str(self.checkpoint_dir),
            "GPUCTL_TENSORBOARD_DIR": str(self.tensorboard_dir),
        }

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> WorkerContext | None:
        """``None`` outside a gpuctl job (plain ``python`` or ``torchrun``)."""
        if "GPUCTL_ROUND_DIR" not in env:
            return None
        return cls(
            cluster=env["GPUCTL_CLUSTER"],
            bucket=env["GPUCTL_BUCKET"],
            job=env["GPUCTL_JOB"],
            round=int(env["GPUCTL_ROUND"]),
            node=env["GPUCTL_NODE"],
            round_dir=Path(env["GPUCTL_ROUND_DIR"]),
            checkpoint_dir=Path(env["GPUCTL_CHECKPOINT_DIR"]),
            tensorboard_dir=Path(env["GPUCTL_TENSORBOARD_DIR"]),
        )
