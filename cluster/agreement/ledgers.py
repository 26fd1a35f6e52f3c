"""Every ledger of a cluster, opened alike by all who read it and write it (see ``ledger.Ledger`` on ``keep``)."""

from __future__ import annotations

from gpuctl.cluster import layout
from gpuctl.cluster.agreement.ledger import Ledger
from gpuctl.cluster.records.checkpoints import CheckpointIndex
from gpuctl.cluster.records.nodes import Rank0
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.records.runs import RunSpec
from gpuctl.cluster.records.snapshots import SnapshotIndex
from gpuctl.cluster.storage.interface import Store


def lease(store: Store) -> Ledger[Rank0]:
    """Who is rank 0, and in which epoch."""
    return Ledger(store, layout.RANK0, Rank0, keep=16)


def queue(store: Store) -> Ledger[str]:
    """The cluster's jobs in the order of their submission: version n is the id of job number n. All are kept."""
    return Ledger(store, layout.QUEUE, str, keep=None)


def rounds(store: Store, job: str) -> Ledger[Round]:
    """The rounds of a job: the newest version is the one that runs, or the last."""
    return Ledger(store, layout.rounds(job), Round, keep=256)


def runs(store: Store, run_id: str) -> Ledger[RunSpec]:
    """The runs of an ID: the newest version is the one to join, or the last that ended."""
    return Ledger(store, layout.runs(run_id), RunSpec, keep=16)


def checkpoints(store: Store, job: str) -> Ledger[CheckpointIndex]:
    """Which checkpoints of a job are committed."""
    return checkpoints_in(store, f"{layout.checkpoints(job)}/")


def checkpoints_in(store: Store, folder: str = "") -> Ledger[CheckpointIndex]:
    """Which checkpoints of a folder are committed; ``folder`` ends with a slash, or is the whole ``store``."""
    return Ledger(store, f"{folder}ledger", CheckpointIndex)


def files(store: Store, job: str) -> Ledger[SnapshotIndex]:
    """Which files of ``$GPUCTL_CHECKPOINT_DIR`` are committed. Only the newest version is read, and each holds the
    whole listing several times: 2 MB for 3000 files."""
    return Ledger(store, f"{layout.files(job)}/ledger", SnapshotIndex, keep=8)
