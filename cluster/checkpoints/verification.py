"""Whether committed checkpoints are whole: their objects, and every byte of them.

May be done while the job runs. What is found wanting is looked up in the log once more, since the job itself removes
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpuctl.cluster.checkpoints.block_reader import bounds, read_block
from gpuctl.cluster.checkpoints.listing import committed, folder
from gpuctl.cluster.checkpoints.manifest import Manifest, Part, manifest_key, read_manifest
from gpuctl.cluster.concurrency import read_each
from gpuctl.cluster.errors import Damaged
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Fault:
    """An object that differs from what was committed."""

    key: str
    """Below the job's checkpoint folder."""
    what: str
    """A sentence that names it."""


@dataclass(frozen=True, slots=True)
class CheckpointCheck:
    """The result of checking one checkpoint."""

    entry: CheckpointEntry
    manifest: Manifest | None
    """``None`` if it cannot be read."""
    faults: tuple[Fault, ...]

    @property
    def whole(self) -> bool:
        return not self.faults


def check(store: Bucket, job: str, entries: Sequence[CheckpointEntry]) -> list[CheckpointCheck]:
    """Whether every part is there with its right size: one listing, and one request for each manifest. Entries that
    are removed meanwhile are left out."""
    if not entries:
        return []
    place = folder(store, job)
    sizes = {item.key: item.size for item in place.list("")}
    with ThreadPoolExecutor(min(len(entries), 16)) as pool:
        found = list(pool.map(lambda entry: _check(place, entry, sizes), entries))
    return _still_committed(store, job, found)


def bytes_to_verify(checked: Iterable[CheckpointCheck]) -> int:
    """What ``verify`` is going to read."""
    return sum(part.size for part in _readable(checked))


def verify(
    store: Bucket, job: str, checked: Sequence[CheckpointCheck], on_bytes: Callable[[int], None] = lambda _: None
) -> list[CheckpointCheck]:
    """Read and check every byte of what ``check`` has found; a part that several checkpoints need is read once. Holds
    ``READS_AT_ONCE`` blocks. Entries that are removed meanwhile are left out. ``on_bytes`` is called from
    several threads."""
    place = folder(store, job)
    differing: dict[Part, list[int]] = {}

    def read(block: tuple[Part, int]) -> bool:
        try:
            read_block(place, *block)
        except Damaged:
            return False
        return True

    def note(block: tuple[Part, int], right: bool) -> None:
        part, number = block
        if not right:
            differing.setdefault(part, []).append(number)
        begin, end = bounds(part, number)
        on_bytes(end - begin)

    read_each(((part, number) for part in _readable(checked) for number in range(len(part.blocks))), read, note)
    there = {item.key for item in place.list("")} if differing else set()
    faults = {part: _differs(part, sorted(numbers), there) for part, numbers in differing.items()}
    found = [
        CheckpointCheck(c.entry, c.manifest, (*c.faults, *(faults[part] for part in _parts(c) if part in faults)))
        for c in checked
    ]
    return _still_committed(store, job, found)


def restored(checked: Sequence[CheckpointCheck]) -> CheckpointEntry | None:
    """The one that a restore takes: the newest that is whole."""
    return next((c.entry for c in reversed(checked) if c.whole), None)


def _check(place: Bucket, entry: CheckpointEntry, sizes: dict[str, int]) -> CheckpointCheck:
    try:
        manifest = read_manifest(place, entry)
    except Damaged as damaged:
        return CheckpointCheck(entry, None, (Fault(manifest_key(entry), str(damaged)),))
    faults = []
    for part in manifest.parts:
        size = sizes.get(part.key)
        if size is None:
            faults.append(Fault(part.key, f"{part.key} is missing"))
        elif size != part.size:
            faults.append(Fault(part.key, f"{part.key} has {size} bytes, not {part.size}"))
    return CheckpointCheck(entry, manifest, tuple(faults))


def _differs(part: Part, numbers: Sequence[int], there: set[str]) -> Fault:
    if part.key not in there:
        return Fault(part.key, f"{part.key} is missing")
    begin, end = bounds(part, numbers[0])
    where = f"bytes {begin} to {end} differ"
    if len(numbers) > 1:
        where = f"{len(numbers)} of its {len(part.blocks)} blocks differ, the first at byte {begin}"
    return Fault(part.key, f"{part.key} is not what was written: {where}")


def _still_committed(store: Bucket, job: str, found: list[CheckpointCheck]) -> list[CheckpointCheck]:
    if all(c.whole for c in found):
        return found
    paths = {entry.path for entry in committed(store, job)}
    return [c for c in found if c.entry.path in paths]


def _parts(checked: CheckpointCheck) -> tuple[Part, ...]:
    return checked.manifest.parts if checked.manifest else ()


def _readable(checked: Iterable[CheckpointCheck]) -> list[Part]:
    """Parts that are there with their right size, each once."""
    known: dict[Part, None] = {}
    for one in checked:
        bad = {fault.key for fault in one.faults}
        known |= {part: None for part in _parts(one) if part.key not in bad}
    return list(known)
