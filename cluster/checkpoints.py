"""A job's committed checkpoints from outside of the job, without torch: list, check, delete them. ``pulled`` fetches.

All of it may be done while the job runs. What is found wanting is looked up in the log once more, since the job itself
removes checkpoints; and what is deleted, is so by the rules of ``commits``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from gpuctl.cluster import commits, jobs, layout
from gpuctl.cluster.blocks import bounds, each, read_block
from gpuctl.cluster.bucket import Bucket, Entry, Store
from gpuctl.cluster.errors import BadInput, Damaged, StoreUnavailable
from gpuctl.cluster.ledger import Ledger
from gpuctl.cluster.manifest import Manifest, Part, manifest_key, read_manifest
from gpuctl.cluster.records import CheckpointEntry, CheckpointLog
from gpuctl.cluster.retention import Retention

_TRIES = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """One object that is not as it was committed."""

    key: str
    """Below the job's checkpoint folder."""
    what: str
    """A sentence that names it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of one checkpoint."""

    entry: CheckpointEntry
    manifest: Manifest | None
    """``None`` if it cannot be read."""
    faults: tuple[Fault, ...]

    @property
    def whole(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class Garbage:
    """What may go."""

    dropped: tuple[CheckpointEntry, ...] = ()
    """Checkpoints that a retention does not keep."""
    left: tuple[Entry, ...] = ()
    """Objects that rounds which are over have left, of checkpoints that were never committed or are removed."""
    frees: int = 0
    """Bytes, of both. What the remaining checkpoints need as well stays, and does not count."""


def ledger(store: Store, job: str) -> Ledger[CheckpointLog]:
    return Ledger(store, f"{layout.checkpoints(job)}/ledger", CheckpointLog)


def folder(store: Bucket, job: str) -> Bucket:
    """The job's checkpoint folder, as ``commits`` and ``manifest`` want to see it."""
    return store.at(layout.checkpoints(job))


def committed(store: Store, job: str) -> tuple[CheckpointEntry, ...]:
    """Oldest first."""
    log = ledger(store, job).read().value
    return log.entries if log else ()


def find(store: Store, job: str, step: str) -> CheckpointEntry:
    """The committed checkpoint of a step, or the ``last`` one. Raises ``BadInput`` naming those that there are."""
    entries = committed(store, job)
    if step == "last" and entries:
        return entries[-1]
    for entry in entries:
        if str(entry.step) == step:
            return entry
    steps = ", ".join(str(entry.step) for entry in entries)
    raise BadInput(f"job {job} has no checkpoint of step {step}", f"it has: {steps or 'none'}")


def copies(store: Store, job: str, entries: Sequence[CheckpointEntry]) -> dict[str, tuple[str, ...]]:
    """By path, for those that have any: the nodes of the job's present round with copies on their disks (``tiers``).
    Nodes keep the last one alone, and once the job is over none."""
    if not entries or not entries[-1].nodes:
        return {}
    last = entries[-1]
    current = jobs.rounds(store, job).read()
    if current.value is None or jobs.outcome_of(current) is not None:
        return {}
    near = tuple(member.node for member in current.value.members if member.node in last.nodes)
    return {last.path: near} if near else {}


# -- whole or not -----------------------------------------------------------------------------------------------------


def check(store: Bucket, job: str, entries: Sequence[CheckpointEntry]) -> list[Checked]:
    """Whether every part is there with its right size: one listing, and one request for each manifest. Entries that
    are removed meanwhile are left out."""
    if not entries:
        return []
    place = folder(store, job)
    sizes = {item.key: item.size for item in place.list("")}
    with ThreadPoolExecutor(min(len(entries), 16)) as pool:
        found = list(pool.map(lambda entry: _check(place, entry, sizes), entries))
    return _still_committed(store, job, found)


def bytes_to_verify(checked: Iterable[Checked]) -> int:
    """What ``verify`` is going to read."""
    return sum(part.size for part in _readable(checked))


def verify(
    store: Bucket, job: str, checked: Sequence[Checked], on_bytes: Callable[[int], None] = lambda _: None
) -> list[Checked]:
    """Read and check every byte of what ``check`` has found; a part that several checkpoints need is read once. Holds
    ``blocks.AT_ONCE`` blocks. Entries that are removed meanwhile are left out. ``on_bytes`` is called from several
    threads."""
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

    each(((part, number) for part in _readable(checked) for number in range(len(part.blocks))), read, note)
    there = {item.key for item in place.list("")} if differing else set()
    faults = {part: _differs(part, sorted(numbers), there) for part, numbers in differing.items()}
    found = [
        Checked(c.entry, c.manifest, (*c.faults, *(faults[part] for part in _parts(c) if part in faults)))
        for c in checked
    ]
    return _still_committed(store, job, found)


def restored(checked: Sequence[Checked]) -> CheckpointEntry | None:
    """The one that a restore takes: the newest that is whole."""
    return next((c.entry for c in reversed(checked) if c.whole), None)


def _check(place: Bucket, entry: CheckpointEntry, sizes: dict[str, int]) -> Checked:
    try:
        manifest = read_manifest(place, entry)
    except Damaged as damaged:
        return Checked(entry, None, (Fault(manifest_key(entry), str(damaged)),))
    faults = []
    for part in manifest.parts:
        size = sizes.get(part.key)
        if size is None:
            faults.append(Fault(part.key, f"{part.key} is missing"))
        elif size != part.size:
            faults.append(Fault(part.key, f"{part.key} has {size} bytes, not {part.size}"))
    return Checked(entry, manifest, tuple(faults))


def _differs(part: Part, numbers: Sequence[int], there: set[str]) -> Fault:
    if part.key not in there:
        return Fault(part.key, f"{part.key} is missing")
    begin, end = bounds(part, numbers[0])
    where = f"bytes {begin} to {end} differ"
    if len(numbers) > 1:
        where = f"{len(numbers)} of its {len(part.blocks)} blocks differ, the first at byte {begin}"
    return Fault(part.key, f"{part.key} is not what was written: {where}")


def _still_committed(store: Bucket, job: str, found: list[Checked]) -> list[Checked]:
    if all(c.whole for c in found):
        return found
    paths = {entry.path for entry in committed(store, job)}
    return [c for c in found if c.entry.path in paths]


def _parts(checked: Checked) -> tuple[Part, ...]:
    return checked.manifest.parts if checked.manifest else ()


def _readable(checked: Iterable[Checked]) -> list[Part]:
    """Parts that are there with their right size, each once."""
    known: dict[Part, None] = {}
    for one in checked:
        bad = {fault.key for fault in one.faults}
        known |= {part: None for part in _parts(one) if part.key not in bad}
    return list(known)


# -- delete -----------------------------------------------------------------------------------------------------------


def freed(store: Bucket, job: str, chosen: Sequence[CheckpointEntry]) -> int:
    """Bytes that ``remove`` would free. Raises ``Damaged`` if what the others need is not known."""
    place = folder(store, job)
    paths = {entry.path for entry in chosen}
    kept = [entry for entry in committed(store, job) if entry.path not in paths]
    return sum(item.size for item in _own(place, chosen, _needed(place, kept)))


def remove(store: Bucket, job: str, chosen: Sequence[CheckpointEntry]) -> int:
    """Delete checkpoints; returns how many bytes became free. Raises ``StoreUnavailable`` and ``Damaged`` as
    ``commits.remove`` does."""
    return commits.remove(folder(store, job), {entry.path for entry in chosen})


def garbage(store: Bucket, job: str, retention: Retention | None) -> Garbage:
    """What ``retention`` does not keep (``None``: it keeps all), and what dead rounds have left. Once the job has
    ended, all of its rounds are dead.

    Raises ``Damaged`` if what the kept ones need is not known, and ``BadInput`` for a metric that no checkpoint has.
    """
    log = ledger(store, job).read().value or CheckpointLog()
    kept = retention.kept(log.entries) if retention else log.entries
    _check_metric(job, retention, log.entries)
    dropped = tuple(entry for entry in log.entries if entry not in kept)
    place = folder(store, job)
    needed = _needed(place, kept)
    own = {item.key: item for item in _own(place, dropped, needed)}
    left = [item for item in commits.left_over(place, needed, _fence(store, job, log)) if item.key not in own]
    return Garbage(dropped, tuple(left), sum(item.size for item in (*own.values(), *left)))


def collect(store: Bucket, job: str, found: Garbage) -> int:
    """Delete it; returns how many bytes became free. What is left over is determined anew, by the log as it is then.

    Safe while the job runs: a checkpoint goes from the log before its parts go, and a commit that builds on one which
    has left the log is refused, after which the job writes it whole (see ``commits``). Of the running round nothing
    counts as left over: it may be about to commit it. A job that has ended gets its fence raised first, so that nothing
    of it commits any more.
    """
    place = folder(store, job)
    removed = remove(store, job, found.dropped) if found.dropped else 0
    if not found.left:
        return removed
    log = _raise_fence(store, job)
    left = commits.left_over(place, _needed(place, log.entries), log.fence)
    place.delete([item.key for item in left])
    return removed + sum(item.size for item in left)


def _own(place: Bucket, chosen: Sequence[CheckpointEntry], needed: set[str]) -> list[Entry]:
    """The objects that ``chosen`` consist of and that are not ``needed``."""
    if not chosen:
        return []
    keys: set[str] = set()
    for entry in chosen:
        with suppress(Damaged):  # what is in its folder goes
            keys |= read_manifest(place, entry).keys()
    folders = tuple(f"{entry.path}/" for entry in chosen)
    return [
        item for item in place.list("") if (item.key in keys or item.key.startswith(folders)) and item.key not in needed
    ]


def _needed(place: Bucket, kept: Sequence[CheckpointEntry]) -> set[str]:
    needed: set[str] = set()
    for entry in kept:
        try:
            needed |= commits.needed_by(place, [entry])
        except Damaged as damaged:
            raise Damaged(
                f"what the checkpoint of step {entry.step} needs is not known: {damaged.message}",
                f"delete it first: gpuctl ckpt rm {entry.step}",
            ) from damaged
    return needed


def _check_metric(job: str, retention: Retention | None, entries: Sequence[CheckpointEntry]) -> None:
    if retention is None or retention.best is None or not entries:
        return
    told = sorted({name for entry in entries for name in entry.metrics})
    if retention.best not in told:
        raise BadInput(
            f"no checkpoint of job {job} has a metric {retention.best!r}", f"they have: {', '.join(told) or 'none'}"
        )


def _fence(store: Bucket, job: str, log: CheckpointLog) -> int:
    """Rounds below it are over for good."""
    current = jobs.rounds(store, job).read()
    if jobs.outcome_of(current) is None or current.value is None:
        return log.fence
    return max(log.fence, current.value.number + 1)


def _raise_fence(store: Bucket, job: str) -> CheckpointLog:
    log = ledger(store, job)
    for _ in range(_TRIES):
        version = log.read()
        value = version.value or CheckpointLog()
        raised = replace(value, fence=_fence(store, job, value))
        if raised == value or log.commit(raised, version.number):
            return raised
    raise StoreUnavailable(f"job {job} kept committing checkpoints meanwhile", "try again")
