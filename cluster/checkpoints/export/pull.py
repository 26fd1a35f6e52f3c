"""A checkpoint on its way from the bucket to a folder of the user's: what it holds, and files that appear there whole.

The formats are in ``safetensors`` and in ``trainers.checkpoint.torch_export``. None of them is ours, so that what was
pulled is read without gpuctl.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpuctl.cluster.checkpoints import listing, verification
from gpuctl.cluster.checkpoints.export.reassembly import Reassembly, byte_size, tensor_of
from gpuctl.cluster.checkpoints.manifest import Manifest, TensorIndex
from gpuctl.cluster.checkpoints.treespec import tensor_names
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import BadInput, CorruptRecord, Damaged, GpuctlError
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.records.snapshots import Snapshot
from gpuctl.cluster.snapshots import maintenance as snapshots_maintenance
from gpuctl.cluster.snapshots.snapshot_log import SnapshotLog
from gpuctl.cluster.storage.bucket import Bucket

OnBytes = Callable[[int], None]
"""Told how many bytes have come since the last call, from several threads."""

ABOUT = "checkpoint.json"
_ASIDE = ".partial"
_PLAIN = "@plain."
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A committed checkpoint whose parts are all there."""

    store: Bucket
    """Shows the job's checkpoint folder."""
    job: str
    entry: CheckpointEntry
    manifest: Manifest
    treespecs: dict[str, Any]
    """Of each item of the state, by its name."""

    def tensors(self, item: str) -> dict[str, TensorIndex]:
        """The tensors of one item, by their names in the checkpoint."""
        return {name: tensor_of(self.manifest, name) for name in tensor_names(self.treespecs[item])}

    def reassembly(self) -> Reassembly:
        return Reassembly(self.store, self.manifest)

    @property
    def tensor_bytes(self) -> int:
        return sum(byte_size(tensor) for item in self.treespecs for tensor in self.tensors(item).values())

    @property
    def bytes_to_read(self) -> int:
        """Bytes to read for all tensors, in whole blocks."""
        reassembly = self.reassembly()
        for item in self.treespecs:
            for name in self.tensors(item):
                reassembly.add_tensor(name, -1, 0)
        return reassembly.bytes


def open_entry(store: Bucket, job: str, entry: CheckpointEntry) -> OpenCheckpoint:
    """Raises ``Damaged`` if a part is missing or has another size."""
    found = verification.check(store, job, [entry])
    if not found:
        raise _removed(entry)
    manifest = found[0].manifest
    if manifest is None or found[0].faults:
        raise Damaged(found[0].faults[0].what)
    place = listing.folder(store, job)
    reassembly = Reassembly(place, manifest)
    items = [name.removeprefix(_PLAIN) for name in manifest.values if name.startswith(_PLAIN)]
    values = {item: reassembly.add_value(_PLAIN + item) for item in items}
    reassembly.fetch(lambda _: None)
    return OpenCheckpoint(place, job, entry, manifest, {item: _treespec(item, value) for item, value in values.items()})


@contextmanager
def reading(store: Bucket, job: str, entry: CheckpointEntry) -> Iterator[None]:
    """A checkpoint that the job removes while it is read is not damaged, and the message says so."""
    try:
        yield
    except Damaged as damaged:
        if all(old.path != entry.path for old in listing.committed(store, job)):
            raise _removed(entry) from damaged
        hint = damaged.hint or "use an earlier checkpoint; gpuctl ckpt verify shows which are intact"
        raise Damaged(damaged.message, hint) from damaged


@contextmanager
def new_files(folder: Path, room: int) -> Iterator[Path]:
    """A folder to write to: when the block ends well, what is in it appears in ``folder``, and else nothing does.

    ``room`` is how many bytes are going to be written. Raises ``GpuctlError`` if there is less, and ``BadInput`` if
    ``folder`` has files already or cannot be written, also in place of any ``OSError`` within the block.
    """
    made = not folder.exists()
    aside = folder / _ASIDE
    try:
        if not made and any(path.name != _ASIDE for path in folder.iterdir()):
            raise BadInput(f"{folder} is not empty", "choose a new folder: nothing is overwritten")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)  # of a pull that was killed
        aside.mkdir()
        if room > shutil.disk_usage(folder).free:
            raise _no_room(folder, room)
        yield aside
        # torch takes .metadata for the sign that a folder is whole.
        for path in sorted(aside.iterdir(), key=lambda path: (path.name.startswith("."), path.name)):
            path.rename(folder / path.name)
        made = False
    except OSError as error:
        if error.errno in _FULL:
            raise _no_room(folder, room) from error
        raise BadInput(f"cannot write to {folder}: {error.strerror or error}", "choose another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if made:
            with suppress(OSError):
                folder.rmdir()


def fetch_files(store: Bucket, job: str, files: Snapshot, folder: Path, on_bytes: OnBytes) -> None:
    """What a script has kept in ``$GPUCTL_CHECKPOINT_DIR``, with each file's time. Raises ``CorruptRecord`` if one is
    missing or damaged, and ``GpuctlError`` if that is because the job replaced the set meanwhile."""
    source = SnapshotLog(store, job, files.round, 0, SystemClock())
    for name, file in files.files.items():
        path = folder / name
        if not _stays_in(folder, path) or (file.link and not _stays_in(folder, path.parent / file.link)):
            raise CorruptRecord(f"the ledger names a file outside of the folder: {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.link:
            path.symlink_to(file.link)
        else:
            tell = _growth_of(path, on_bytes)
            try:
                source.fetch(file, path, tell)
            except CorruptRecord as error:
                if files not in snapshots_maintenance.sets(store, job):
                    raise GpuctlError(f"the files of {job} were replaced meanwhile", "pull the newer ones") from error
                raise CorruptRecord(
                    error.message, f"gpuctl ckpt verify files --job {job} shows which are intact"
                ) from error
            tell()


def _growth_of(path: Path, on_bytes: OnBytes) -> Callable[[], None]:
    told = 0

    def tell() -> None:
        nonlocal told
        size = path.stat().st_size
        on_bytes(size - told)
        told = size

    return tell


def _stays_in(folder: Path, path: Path) -> bool:
    return folder in Path(os.path.normpath(path)).parents


def file_name(item: str) -> str:
    """An item of the state may have any name; a file may not."""
    return quote(item, safe=" ,+=()[]")


def write_about(opened: OpenCheckpoint, folder: Path) -> None:
    """``checkpoint.json``: where the files come from."""
    entry = opened.entry
    about = {"job": opened.job, "step": entry.step, "round": entry.round, "at": entry.at, "metrics": entry.metrics}
    write_json(folder / ABOUT, about)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _treespec(item: str, value: bytearray) -> Any:
    try:
        treespec = json.loads(value)
        tensor_names(treespec)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Damaged(f"the checkpoint's record of {item!r} is invalid: {error!r}") from error
    return treespec


def _removed(entry: CheckpointEntry) -> GpuctlError:
    return GpuctlError(f"the checkpoint of step {entry.step} was removed meanwhile", "use a newer one: gpuctl ckpt ls")


def _no_room(folder: Path, room: int) -> GpuctlError:
    free = shutil.disk_usage(folder).free
    return GpuctlError(
        f"no space in {folder}: {room / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free",
        "choose a folder on another disk",
    )
