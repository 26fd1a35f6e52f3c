"""gpuctl rents the cheapest GPUs a cloud will give, runs your training script on them, and treats losing a machine as
a normal event.

The public names below are loaded on first use, so that ``import gpuctl`` costs nothing in a process that only reads a
status: ``torch`` is imported by the first of them that needs it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import takes 5 ms
if TYPE_CHECKING:
    from gpuctl.bootstrap.rendezvous.mingle import mingle
    from gpuctl.cluster.checkpoints.retention import Retention
    from gpuctl.trainers.checkpoint.checkpointer import Checkpointer
    from gpuctl.trainers.checkpoint.dcp.reader import BucketReader
    from gpuctl.trainers.checkpoint.dcp.writer import BucketWriter
    from gpuctl.trainers.metrics.stream import log_metrics
    from gpuctl.trainers.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["BucketReader", "BucketWriter", "Checkpointer", "Retention", "Trainer", "__version__", "log_metrics", "mingle"]

_HOMES = {
    "BucketReader": "gpuctl.trainers.checkpoint.dcp.reader",
    "BucketWriter": "gpuctl.trainers.checkpoint.dcp.writer",
    "Checkpointer": "gpuctl.trainers.checkpoint.checkpointer",
    "Retention": "gpuctl.cluster.checkpoints.retention",
    "Trainer": "gpuctl.trainers.trainer",
    "log_metrics": "gpuctl.trainers.metrics.stream",
    "mingle": "gpuctl.bootstrap.rendezvous.mingle",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpuctl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
