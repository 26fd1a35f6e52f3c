"""Reads a committed checkpoint for torch.distributed.checkpoint (see ``dcp``)."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Manifest, read_manifest
from gpuctl.cluster.checkpoints.treespec import tensor_names
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.trainers.checkpoint.dcp.flatten import Path, is_tensor, leaves_of
from gpuctl.trainers.checkpoint.load import reader
from gpuctl.trainers.checkpoint.load.reader import read_values
from gpuctl.trainers.checkpoint.load.sources import BucketSource, Parts
from gpuctl.trainers.checkpoint.location import CheckpointLocation, place_of, step_of
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits
from gpuctl.trainers.checkpoint.state.load_targets import metadata_of
from gpuctl.trainers.checkpoint.state.treespec import unflatten_state
from gpuctl.trainers.checkpoint.tensor_bytes import dtype_of
from gpuctl.trainers.console import say


class BucketReader(StorageReader):
    """Lets ``dcp.load`` read a committed checkpoint: that of ``step``, or the newest one. ``url`` and ``store`` are as
    for ``BucketWriter``; in a job's own folder, older rounds commit nothing any more once it was read.

    Each rank reads the blocks that its tensors need, and no load succeeds with a byte that is not verified. A damaged
    checkpoint is an error that names the part, and what was to be loaded is then partly filled, perhaps with what is
    damaged; ``step`` chooses another one. DCP raises it as a ``CheckpointException`` with our ``Damaged`` among its
    ``failures``, or with its message.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        step: int | None = None,
        limits: TransferLimits | None = None,
        store: PartStore | None = None,
    ) -> None:
        self._url = url
        self._given = None if store is None else CheckpointLocation(store)
        self._step = None if step is None else step_of(step)
        self._limits = limits or TransferLimits()
        self._opened: _Opened | None = None

    def steps(self) -> list[int]:
        """Those that are committed, oldest first."""
        return [entry.step for entry in self._place().entries()]

    @property
    def loaded(self) -> int | None:
        """The step that was read last."""
        return self._opened.entry.step if self._opened else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._opened = None
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).isdecimal()

    def read_metadata(self) -> Metadata:
        """Raises ``BadInput`` if there is no such checkpoint, and ``Damaged``."""
        try:
            return self._metadata()
        except GpuctlError as error:
            if torch.__version__ < "2.12":  # there, dcp.load keeps it to itself: AssertionError
                say(str(error))
            raise

    def _metadata(self) -> Metadata:
        place = self._place()
        entry = _chosen(place.entries(), self._step)
        manifest = read_manifest(place.store, entry)
        parts = Parts([BucketSource(place.store)])
        values = read_values(manifest, (name for name in manifest.values if not name.startswith("@rng.")), parts)
        self._opened = _Opened(entry, manifest, parts, {})
        paths: dict[str, Path] = {}
        tensors = []
        for path, leaf in leaves_of(manifest, entry.path, values.get):
            if is_tensor(leaf):
                name = leaf["of"]
                tensors.append(name)
            else:
                name = ".".join(map(str, path))
                self._opened.values[name] = leaf
            paths[name] = path
        metadata = metadata_of(manifest, tensors)
        metadata.state_dict_metadata |= {name: BytesStorageMetadata() for name in self._opened.values}
        metadata.planner_data = paths
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._now().entry.path)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise GpuctlError(
                "the newest checkpoint changed while the ranks looked for it", "load again, or name a step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        filled: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []

        def room_for(item: ReadItem) -> torch.Tensor:
            target = planner.resolve_tensor(item).detach()
            dtype = dtype_of(self._now().manifest.tensors[item.storage_index.fqn])
            if tuple(target.shape) != tuple(item.lengths):
                raise BadInput(f"{item.dest_index.fqn!r} has {list(target.shape)}, not {list(item.lengths)}")
            room = target if target.dtype == dtype else torch.empty(item.lengths, dtype=dtype)
            filled.append((item, target, room))
            return room

        self._read([item for item in plan.items if item.type == LoadItemType.TENSOR], room_for)
        for item, target, room in filled:
            if room is not target:
                target.copy_(room)
            planner.commit_tensor(item, target)
        wanted = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        values = self._values({item.storage_index.fqn for item in wanted})
        for item in wanted:
            pickle = io.BytesIO()
            torch.save(values[item.storage_index.fqn], pickle)
            pickle.seek(0)
            planner.load_bytes(item, pickle)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _values(self, wanted: Iterable[str]) -> dict[str, Any]:
        opened = self._now()
        treespecs = {name: opened.values[name] for name in wanted}
        inner = [name for treespec in treespecs.values() for name in tensor_names(treespec)]
        tensors = {
            name: torch.empty(i.shape, dtype=dtype_of(i)) for name in inner for i in [opened.manifest.tensors[name]]
        }
        items = create_default_local_load_plan(tensors, metadata_of(opened.manifest, tensors)).items

        def room_for(item: ReadItem) -> torch.Tensor:
            room = tensors[item.dest_index.fqn]
            for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                room = room.narrow(dim, offset, length)
            return room

        self._read(items, room_for)
        return {name: unflatten_state(treespec, tensors) for name, treespec in treespecs.items()}

    def _read(self, items: Iterable[ReadItem], room_for: Callable[[ReadItem], torch.Tensor]) -> None:
        opened = self._now()
        # A block of one part may wait for that of the next.
        threads = self._limits.reads(max((part.size for part in opened.manifest.parts), default=0) + BLOCK_BYTES)
        reader.load(opened.manifest, items, room_for, opened.parts, threads)

    def _now(self) -> _Opened:
        assert self._opened is not None, "read_metadata comes first"
        return self._opened

    def _place(self) -> CheckpointLocation:
        return self._given or place_of(self._url)


@dataclass(frozen=True, slots=True)
class _Opened:
    entry: CheckpointEntry
    manifest: Manifest
    parts: Parts
    values: dict[str, Any]
    """The skeleton of each value, by DCP's name for it."""


def _chosen(entries: tuple[CheckpointEntry, ...], step: int | None) -> CheckpointEntry:
    for entry in reversed(entries):
        if step is None or entry.step == step:
            return entry
    which = "" if step is None else f" of step {step}"
    there = ", ".join(str(entry.step) for entry in entries) or "none"
    raise BadInput(f"no checkpoint{which} found", f"available steps: {there}")
