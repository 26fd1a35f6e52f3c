"""A committed checkpoint into a state, on all ranks at once."""

from __future__ import annotations

from gpuctl.cluster.checkpoints.manifest import Manifest, read_manifest
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.trainers.checkpoint.load import reader
from gpuctl.trainers.checkpoint.load.reader import read_values
from gpuctl.trainers.checkpoint.load.sources import Parts
from gpuctl.trainers.checkpoint.ranks import Ranks
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits
from gpuctl.trainers.checkpoint.state.load_targets import LoadTargets
from gpuctl.trainers.checkpoint.state.private import keys_of
from gpuctl.trainers.checkpoint.state.state_tensors import State
from gpuctl.trainers.world import World


def restore(
    store: PartStore,
    entry: CheckpointEntry,
    state: State,
    parts: Parts,
    ranks: Ranks,
    limits: TransferLimits,
) -> Manifest:
    """Load the checkpoint ``entry`` into ``state``; returns its manifest.

    Args:
        store: the job's checkpoint folder.
        entry: the committed checkpoint.
        state: see ``Checkpointer``.
        parts: where its parts are read from.
        ranks: all ranks make this call.
        limits: what reading may take of the machine.

    Raises, on every rank, what it raised on any; ``Damaged`` gives way to any other error.
    """
    rank = World.now().rank
    loading: list[tuple[Manifest, LoadTargets]] = []

    def plan() -> None:
        manifest = read_manifest(store, entry)
        names = {f"@plain.{key}" for name, item in state.items() for key in keys_of(name, item, rank)}
        values = read_values(manifest, [*names, f"@rng.{rank}"], parts)
        targets = LoadTargets(state, manifest, entry.path, rank, values.get)
        loading.append((manifest, targets))

    ranks.together(plan)
    ((manifest, targets),) = loading
    threads = limits.reads(max((part.size for part in manifest.parts), default=0))
    ranks.together(lambda: reader.load(manifest, targets.items(), targets.box, parts, threads))
    targets.finish()
    return manifest
