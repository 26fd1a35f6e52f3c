"""Checkpoints without code: what workers write under ``$GPUCTL_CHECKPOINT_DIR`` goes to the bucket in whole sets and is
back on whichever node runs next before the script starts.

When a set is taken (``docs/decisions/0010-files-without-code.md`` has the reasons):

- While the workers run, once every file is at rest: closed, and unchanged for ``quiet_s``. A folder where always some
  file is not, the same one or another, is waited for three times that if they are closed, and for 10 minutes while one
  is open for writing. Then what is at rest is taken, and what is not is left out.
  Logs (``*tfevents*``, ``*.log``, ``*.csv``, ``*.jsonl``, ``*.wandb``) hold nothing back. Names that say so
  (``*.tmp``, ``*.partial`` …) hold back and are never part of a set.
- When the workers have ended by themselves with exit code 0: at once, all of it. What they started may still write: a
  log is waited for a moment and any other file a minute, and then there is no such set, and the job is told so.
- When they were killed, or failed: only what was at rest before. What is cut off never replaces what is whole.

A file that was left out of a set, because it was being written, is there as the set before had it. So is one that holds
nothing back and changed while it was copied. If any other did, there is no set: it may be half of a new checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from gpuctl.bootstrap.mirror.quiescence import RESTLESS_S, QuiescenceTracker, is_log, is_unfinished
from gpuctl.bootstrap.mirror.watched_folder import FileStamp, WatchedFolder, is_running, open_for_writing
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import BadInput, CorruptRecord, Fenced, GpuctlError, StoreUnavailable
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.records.snapshots import StoredFile
from gpuctl.cluster.snapshots.snapshot_log import Changes, FileChanged, Files, SnapshotLog, TransferCancelled
from gpuctl.cluster.storage.bucket import Bucket

QUIET = "GPUCTL_CHECKPOINT_QUIET_S"
"""In a job's environment: seconds without a change after which its files are taken to be whole."""
_QUIET_S = 1.0
_CLEAN_TURN_S = 1.0
_BUSY_TURN_S = 0.25
_PATIENCE_S = 60.0
"""For a bucket that does not answer, or a file still written to, when a run waits for nothing but its last set."""
_LOG_PATIENCE_S = 2.0
"""For a log that is still written to then."""
_HURRY_S = 5.0
"""For a set that is on its way when the next round waits for this one to end."""
_HELD_OPEN = 256


class Mirror:
    """Mirrors one run's checkpoint folder to the bucket. ``restore``, then ``watch``, then ``finish``; ``hurry`` may be
    called from any thread."""

    def __init__(
        self, store: Bucket, folder: WatchedFolder, round_: Round, rank: int, clock: Clock, say: Callable[[str], None]
    ) -> None:
        self._sets = SnapshotLog(store, round_.job, round_.number, rank, clock)
        self._folder = folder
        self._nproc = round_.members[rank].nproc
        self._clock = clock
        self._prefix = f"{round_.job} round {round_.number}"
        self._tell = say
        self._workers: Callable[[], list[int]] = list
        self._base: Files | None = None
        self._changes: Changes = {}
        """What the ledger has from this node, unless ``_unsure``: then it may have something newer."""
        self._unsure = False
        self._quiescence = QuiescenceTracker({}, _QUIET_S)
        self._settled: tuple[dict[str, FileStamp], list[str]] | None = None
        self._committed: dict[str, FileStamp] = {}
        self._deadline: float | None = None
        self._superseded = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def restore(self, env: Mapping[str, str]) -> None:
        """Make the folder equal to the newest set.

        Waits for a bucket that does not answer. Raises ``Fenced`` if this round is over, ``CorruptRecord`` if there are
        sets and none is whole, ``BadInput`` for a setting in the job's environment ``env``.
        """
        quiet_s = _quiet_s(env)
        self._folder.path.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                self._base = self._sets.begin()
                fetched = self._folder.make_equal(self._base, self._fetch)
                break
            except TransferCancelled:
                raise Fenced("this round was stopped while it started") from None
            except StoreUnavailable as error:
                self._say(f"waiting for the checkpoint folder: {error}")
                if self._done.wait(1.0):
                    raise Fenced("this round was stopped while it started") from None
        if self._base:
            self._say(f"the checkpoint folder has {len(self._base)} files, {fetched} of them fetched")
        self._committed = self._folder.scan()
        self._quiescence = QuiescenceTracker(self._committed, quiet_s)

    def watch(self, workers: Callable[[], list[int]]) -> None:
        """Take sets from now on. ``workers`` tells the pids of this node's workers."""
        self._workers = workers
        self._thread = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """The next round waits: break off what takes more than a few seconds."""
        if self._deadline is None:
            self._deadline = self._clock.monotonic() + (_HURRY_S if self._thread else 0.0)
            if self._thread is None:
                self._done.set()

    def finish(self, *, whole: bool) -> str:
        """Take the last set, now that no worker is left; ``whole`` if they all ended well. Returns what went wrong, or
        nothing: a newer round that forbids it is nothing wrong."""
        self._done.set()
        if self._base is None or self._thread is None:
            return ""
        with contextlib.suppress(OSError):  # met again below
            self._superseded = whole and self._folder.scan() != (self._settled or ({}, []))[0]
        self._thread.join()
        self._superseded = False
        began = self._clock.monotonic()
        give_up_at = began + _PATIENCE_S
        while True:
            try:
                self._take_last(whole, without_logs=self._clock.monotonic() > began + _LOG_PATIENCE_S)
                return ""
            except (Fenced, TransferCancelled):
                return ""
            except (FileChanged, StoreUnavailable) as error:
                if self._clock.monotonic() > min(give_up_at, self._deadline or give_up_at) or not whole:
                    return str(error)
            except (GpuctlError, OSError) as error:
                return str(error)
            threading.Event().wait(0.5)

    # -- when ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        trouble = ""
        while not self._done.wait(_CLEAN_TURN_S if self._quiescence.seen == self._committed else _BUSY_TURN_S):
            try:
                if self._turn():
                    trouble = ""
            except Fenced as error:
                self._say(f"no more files are saved: {error}")
                return
            except TransferCancelled:
                return
            except (GpuctlError, OSError) as error:
                if str(error) != trouble:
                    self._say(f"cannot save the checkpoint folder yet: {error}")
                trouble = str(error)

    def _turn(self) -> bool:
        """Whether the bucket has the folder as it is, as far as it is at rest."""
        seen = self._folder.scan()
        if seen == self._committed == self._quiescence.seen and not self._quiescence.is_restless:
            return True
        chosen = self._at_rest(seen)
        if chosen is None:
            return False
        self._settled = (seen, chosen)
        self._take(seen, chosen, self._quiescence.loose)
        self._quiescence.made()
        return True

    def _at_rest(self, seen: dict[str, FileStamp]) -> list[str] | None:
        """The files that make a set, or ``None`` while one would not be whole."""
        workers = self._workers()
        opened = open_for_writing(workers, seen)
        # Asked after all else: a file that its writer's death has closed is then not taken for a finished one.
        alive = sum(map(is_running, workers)) == self._nproc
        chosen = self._quiescence.look(seen, opened, self._clock.monotonic())
        return chosen if alive else None

    def _take_last(self, whole: bool, *, without_logs: bool) -> None:
        seen = self._folder.scan()
        if whole:
            chosen = [path for path in seen if not is_unfinished(path)]
        elif self._settled and seen == self._settled[0]:
            chosen = self._settled[1]
        else:
            return
        if seen == self._committed and not whole:
            return
        loose = {path for path in chosen if is_log(path)} if without_logs or not whole else set()
        if missed := self._take(seen, chosen, loose):
            self._say(f"the last snapshot lacks the end of {', '.join(missed)}, still being written")

    # -- what ---------------------------------------------------------------------------------------------------------

    def _take(self, seen: dict[str, FileStamp], chosen: list[str], loose: Set[str]) -> list[str]:
        """Commit the folder as it was when ``seen``. Raises ``FileChanged``, and does nothing, if a file was written to
        since; those of them that are ``loose`` it only leaves out, and returns."""
        entries: Files = {}
        with ExitStack() as opened:
            # A file that is replaced or deleted while others are copied lives on for as long as it is open here.
            held: dict[str, BinaryIO] = {}
            for path in chosen:
                if not seen[path].link and self._folder.digest(path, seen[path]) is None and len(held) < _HELD_OPEN:
                    with contextlib.suppress(FileChanged):
                        held[path] = opened.enter_context(self._open(path))
            for path in chosen:
                try:
                    entries[path] = self._entry(path, seen[path], held.get(path))
                except FileChanged:
                    if path not in loose:
                        raise
            changes = self._against_base(seen, entries)
            if changes != self._changes or self._unsure:
                self._commit(changes, lambda path: self._entry(path, seen[path], held.get(path)))
        self._committed = seen
        return [path for path in chosen if path not in entries]

    def _commit(self, changes: Changes, anew: Callable[[str], StoredFile]) -> None:
        self._unsure = True
        while missing := self._sets.commit(changes):
            changes.update((path, anew(path)) for path in missing)
        new = [file for path, file in changes.items() if file and file != self._changes.get(path)]
        self._say(f"saved {len(new)} new files of the checkpoint folder, {sum(f.size for f in new) / 1e6:.1f} MB")
        self._changes = changes
        self._unsure = False

    def _against_base(self, seen: dict[str, FileStamp], entries: Files) -> Changes:
        assert self._base is not None
        changes: Changes = {path: None for path in self._base if path not in seen}
        for path, entry in entries.items():
            if not _same(entry, self._base.get(path)):
                changes[path] = entry
        for path, before in self._changes.items():
            if path in seen and path not in entries:
                changes[path] = before  # being written: as the set before had it
        return changes

    def _entry(self, path: str, sign: FileStamp, file: BinaryIO | None) -> StoredFile:
        """The record of a file whose content is in the bucket when this returns. Raises ``FileChanged``."""
        if sign.link:
            return StoredFile(link=sign.link)
        assert self._base is not None
        digest = self._folder.digest(path, sign)
        blob = self._sets.blob_of(digest) if digest else None
        if digest is None or blob is None:
            with contextlib.nullcontext(file) if file else self._open(path) as opened:
                digest = digest or self._folder.read_digest(path, sign, opened)
                if digest is None:
                    raise FileChanged(f"{path} changed while it was read")
                blob = self._sets.blob_of(digest) or self._sets.upload(opened, sign.size, digest, self._may_go_on)
        return StoredFile(size=sign.size, sha256=digest, blob=blob, modified_ns=sign.modified_ns)

    def _open(self, path: str) -> BinaryIO:
        try:
            return (self._folder.path / path).open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileChanged(f"{path} was removed before it was copied") from error

    def _fetch(self, file: StoredFile, path: Path) -> None:
        for last_try in (False, True):
            try:
                return self._sets.fetch(file, path, self._may_go_on)
            except CorruptRecord as error:
                if last_try:
                    self._say(f"{error}; the previous snapshot is used instead")
                    self._sets.forget(file.blob)
                    raise Fenced("the next round starts from the previous snapshot") from error
        return None

    def _say(self, line: str) -> None:
        self._tell(f"{self._prefix}: {line}")

    def _may_go_on(self) -> None:
        if self._superseded or (self._deadline is not None and self._clock.monotonic() > self._deadline):
            raise TransferCancelled


def _same(entry: StoredFile, other: StoredFile | None) -> bool:
    return other is not None and (entry.sha256, entry.link) == (other.sha256, other.link)


def _quiet_s(env: Mapping[str, str]) -> float:
    text = env.get(QUIET, "")
    try:
        seconds = float(text or _QUIET_S)
        if 0 < seconds < RESTLESS_S:
            return seconds
    except ValueError:
        pass
    raise BadInput(f"{QUIET}={text} is not a number of seconds between 0 and {RESTLESS_S:g}", f"for example {QUIET}=5")
