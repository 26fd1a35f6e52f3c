"""Commits what torch.distributed.checkpoint saves (see ``dcp``)."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from gpuctl.cluster.checkpoints.commit_log import folder_of
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.trainers.checkpoint.dcp.flatten import documents_of
from gpuctl.trainers.checkpoint.dcp.part_stream import PartStream, TensorRange, part_bytes
from gpuctl.trainers.checkpoint.dcp.partition import Assignment, assign, box_of, held, ranges_of
from gpuctl.trainers.checkpoint.location import CheckpointLocation, place_of, step_of
from gpuctl.trainers.checkpoint.save.commit import Waiting, collect_garbage, entry_of, timed
from gpuctl.trainers.checkpoint.save.host_buffer import layout_of
from gpuctl.trainers.checkpoint.save.partition import Box, RankPartition
from gpuctl.trainers.checkpoint.save.report import RankReport, manifest_of, report_of
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits, Uploader, persist
from gpuctl.trainers.checkpoint.state.treespec import flatten_state

T = TypeVar("T")


class BucketWriter(StorageWriter):
    """Commits what ``dcp.save`` or ``dcp.async_save`` saves as the checkpoint of ``step``, a count of optimizer steps.

    ``url`` is a bucket URL or a local path; by default it is the job's own folder in the cluster's bucket, and the
    commit is then fenced by the job's round. Elsewhere a process takes a round of its own with its first save there.
    ``store`` takes the place of ``url`` where a program has its own.

    ``keep`` is how many checkpoints stay, or a ``Retention``; by default all do. ``metrics`` are kept with it, for
    ``Retention.best``. A checkpoint of the same or a later step is replaced. ``dcp.save(checkpoint_id="200")`` with the
    same writer saves another step.

    DCP raises a ``CheckpointException`` on all ranks, with our errors as its ``failures``: ``Fenced`` if a newer round
    has begun, ``BadInput`` naming what cannot be kept, ``StoreError`` if the bucket refuses. One that is away is waited
    for.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        step: int | None = None,
        keep: int | Retention | None = None,
        metrics: Mapping[str, float] | None = None,
        limits: TransferLimits | None = None,
        store: PartStore | None = None,
    ) -> None:
        self._url = url
        self._given = None if store is None else CheckpointLocation(store)
        self._step = None if step is None else step_of(step)
        self._retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        self._metrics = dict(metrics or {})
        self._limits = limits or TransferLimits()
        self._rank = 0
        self._is_coordinator = False
        self._begun = 0.0
        self._folder = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).isdecimal()

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise BadInput(
                "BucketWriter needs collectives, to know when all ranks are done", "leave use_collectives as it is"
            )
        if self._step is None:
            raise BadInput("there is no step to save this as", "use BucketWriter(url, step=…)")
        self._rank, self._is_coordinator = kwargs.get("rank", 0), is_coordinator
        self._begun = time.monotonic()
        self._waiting = Waiting(self._step)
        if is_coordinator:
            self._outlast(lambda: self._place().begin(self._retention))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=held(plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assignment = assign(plans, [plan.storage_data or () for plan in plans])
        return [dataclasses.replace(plan, storage_data=of) for plan, of in zip(plans, assignment, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        place = self._place()
        # A folder of each rank's own: a plan that DCP has cached would tell of that of an earlier save.
        self._folder = folder_of(
            self._now(), self._outlast(lambda: place.round(self._is_coordinator)), secrets.token_hex(4), 0
        )
        # With cached plans, ranks may go by plans of different saves, which do not share a cut.
        assignment: Assignment | None = None if getattr(planner, "_enable_plan_caching", False) else plan.storage_data
        tensor_ranges: list[TensorRange] = []
        indices: list[MetadataIndex] = []
        for item_range in ranges_of(plan, assignment):
            found = partial(_found, planner, item_range.item)
            tensor_ranges.append(
                TensorRange(item_range.item.index.fqn, box_of(item_range.item), item_range.low, item_range.high, found)
            )
            indices.append(item_range.item.index)
        results = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value, own = _value(planner, item.index)
                tensor_ranges += own
                indices += [item.index] * len(own)
                results.append(WriteResult(item.index, 0, _Value(value)))
        stream = PartStream(tensor_ranges, part_bytes(self._limits))
        parts = self._uploader(place).upload(
            stream.parts(f"{self._folder}/{self._rank:05d}"), {}, threading.Event(), on_trouble=self._waiting.tell
        )
        for one, index, report in zip(tensor_ranges, indices, stream.reports(self._now(), parts), strict=True):
            results.append(WriteResult(index, one.high - one.low, report))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        place = self._place()
        told = [result for of_rank in results for result in of_rank]
        values = {result.index.fqn: result.storage_data.treespec for result in told if _is_value(result)}
        reports = [result.storage_data for result in told if not _is_value(result)]
        manifest = manifest_of([*reports, self._documents(place, documents_of(metadata, values))])
        entry = entry_of(
            manifest,
            self._folder,
            step=self._now(),
            round_number=place.round(self._is_coordinator),
            world=len(results),
            metrics=self._metrics,
        )
        entry = msgspec.structs.replace(entry, written=entry.bytes)  # nothing is shared with earlier ones
        self._outlast(lambda: place.commit(timed(entry, self._begun), manifest, self._retention))
        collect_garbage(lambda: place.delete_unneeded(self._retention))

    def _documents(self, place: CheckpointLocation, documents: dict[str, bytes]) -> RankReport:
        """Write the documents; for the coordinator."""
        share = RankPartition({}, (), tuple(documents), {})
        layout = layout_of(share, documents)
        data = bytearray(layout.size)
        for name, at, size in layout.values:
            data[at : at + size] = documents[name]
        view = memoryview(data)
        items = ((f"{self._folder}/values-{n:04d}", view[low:high]) for n, (low, high) in enumerate(layout.parts()))
        parts = self._uploader(place).upload(items, {}, threading.Event(), on_trouble=self._waiting.tell)
        return report_of(self._now(), share, layout, parts)

    def _now(self) -> int:
        assert self._step is not None, "set_up_storage_writer has seen to it"
        return self._step

    def _place(self) -> CheckpointLocation:
        # Not kept: DCP hands a writer to another process where that one saves.
        return self._given or place_of(self._url)

    def _uploader(self, place: CheckpointLocation) -> Uploader:
        return Uploader(place.store, self._limits)

    def _outlast(self, call: Callable[[], T]) -> T:
        return persist(call, threading.Event(), self._waiting.tell)


@dataclass(frozen=True, slots=True)
class _Value:
    """A rank's report of an item that is no tensor; of one that is, it tells a ``RankReport``."""

    treespec: Any


def _is_value(result: WriteResult) -> bool:
    return isinstance(result.storage_data, _Value)


def _found(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    found = planner.resolve_data(item)
    assert isinstance(found, torch.Tensor), "an item that is no value is a tensor"
    return found


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _value(planner: SavePlanner, index: MetadataIndex) -> tuple[Any, list[TensorRange]]:
    """The skeleton of a value, and the tensors and arrays within it."""
    if not isinstance(planner, DefaultSavePlanner):
        raise BadInput(
            f"{index.fqn!r} of the state to save is not a tensor, and only a DefaultSavePlanner gives its value",
            "derive the planner from DefaultSavePlanner",
        )
    tensors: dict[str, torch.Tensor] = {}
    treespec = flatten_state(planner.lookup_object(index), index.fqn, tensors)
    tensor_ranges = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise BadInput(f"{name!r} of the state to save is a shard within a value", "keep it in a dict or a list")
        shape = tuple(tensor.shape)
        box = Box(str(tensor.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape)
        tensor_ranges.append(TensorRange(name, box, 0, box.bytes, partial(_itself, tensor)))
    return treespec, tensor_ranges
