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
    from gpuctl.trainers.checkpoint.state.private import First, Private
    from gpuctl.trainers.compression.cast import Cast
    from gpuctl.trainers.compression.int8 import Int8
    from gpuctl.trainers.compression.topk import TopK
    from gpuctl.trainers.metrics.stream import log_metrics
    from gpuctl.trainers.strategies.gradient.compressed import Compressed
    from gpuctl.trainers.strategies.gradient.dgc import DGC
    from gpuctl.trainers.strategies.gradient.powersgd import PowerSGD
    from gpuctl.trainers.strategies.gradient.synchronous import Synchronous
    from gpuctl.trainers.strategies.named import strategy
    from gpuctl.trainers.strategies.outer.diloco import DiLoCo
    from gpuctl.trainers.strategies.outer.local_sgd import LocalSGD
    from gpuctl.trainers.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "DGC",
    "BucketReader",
    "BucketWriter",
    "Cast",
    "Checkpointer",
    "Compressed",
    "DiLoCo",
    "First",
    "Int8",
    "LocalSGD",
    "PowerSGD",
    "Private",
    "Retention",
    "Synchronous",
    "TopK",
    "Trainer",
    "__version__",
    "log_metrics",
    "mingle",
    "strategy",
]

_HOMES = {
    "BucketReader": "gpuctl.trainers.checkpoint.dcp.reader",
    "BucketWriter": "gpuctl.trainers.checkpoint.dcp.writer",
    "Cast": "gpuctl.trainers.compression.cast",
    "Checkpointer": "gpuctl.trainers.checkpoint.checkpointer",
    "Compressed": "gpuctl.trainers.strategies.gradient.compressed",
    "DiLoCo": "gpuctl.trainers.strategies.outer.diloco",
    "DGC": "gpuctl.trainers.strategies.gradient.dgc",
    "First": "gpuctl.trainers.checkpoint.state.private",
    "Int8": "gpuctl.trainers.compression.int8",
    "LocalSGD": "gpuctl.trainers.strategies.outer.local_sgd",
    "PowerSGD": "gpuctl.trainers.strategies.gradient.powersgd",
    "Private": "gpuctl.trainers.checkpoint.state.private",
    "Retention": "gpuctl.cluster.checkpoints.retention",
    "Synchronous": "gpuctl.trainers.strategies.gradient.synchronous",
    "TopK": "gpuctl.trainers.compression.topk",
    "Trainer": "gpuctl.trainers.trainer",
    "log_metrics": "gpuctl.trainers.metrics.stream",
    "strategy": "gpuctl.trainers.strategies.named",
    "mingle": "gpuctl.bootstrap.rendezvous.mingle",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpuctl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
