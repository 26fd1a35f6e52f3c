"""A folder that workers write to: what lies in it, what of it is being written, and making it equal to a set."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import psutil

from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.snapshots import StoredFile

_CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)
"""Of a path that was listed: removed since, or another kind of thing now."""


class FileStamp(NamedTuple):
    """What shows, without reading, that a file was replaced or written to."""

    device: int
    inode: int
    size: int
    modified_ns: int
    link: str = ""
    """Where a symbolic link points, relative to its own folder; else empty."""


class WatchedFolder:
    """One job's checkpoint folder on this node. It remembers digests, so it outlives a round. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.aside = path.with_name(path.name + ".aside")
        """Where a restore moves what is not in the set. Holds what the last one moved."""
        self._incoming = path.with_name(path.name + ".incoming")
        self._digests: dict[str, tuple[FileStamp, str]] = {}

    def scan(self) -> dict[str, FileStamp]:
        """Every regular file and every symbolic link to something in the folder, by its path with ``/``.

        Not seen: empty folders, links out of it, pipes and sockets, names that are no UTF-8. Raises ``OSError`` if it
        cannot see what is there: that is not removed.
        """
        return dict(self._scan(""))

    def digest(self, path: str, sign: FileStamp) -> str | None:
        """The SHA-256 of a file, if it is known."""
        known = self._digests.get(path)
        return known[1] if known and known[0] == sign else None

    def read_digest(self, path: str, sign: FileStamp, file: BinaryIO) -> str | None:
        """The SHA-256 of an open file, or ``None`` if it does not answer to ``sign`` any more."""
        hashing = hashlib.sha256()
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            hashing.update(chunk)
        if _sign_of(os.fstat(file.fileno())) != sign:
            return None
        self._digests[path] = (sign, hashing.hexdigest())
        return hashing.hexdigest()

    def make_equal(self, files: Mapping[str, StoredFile], fetch: Callable[[StoredFile, Path], None]) -> int:
        """Have exactly ``files`` in the folder; returns how many had to be fetched. Nobody may write there meanwhile.

        Nothing is touched until all is fetched. What is not in the set is moved to ``aside``. Raises ``GpuctlError`` if
        there is no room for it.
        """
        have = self.scan()
        wrong = {path: file for path, file in files.items() if not self._has(path, file, have.get(path))}
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir(parents=True)
        contents = [(path, file) for path, file in wrong.items() if not file.link]
        try:
            for number, (_, file) in enumerate(contents):
                fetch(file, self._incoming / str(number))
            self._set_aside([path for path in have if path not in files or path in wrong])
            for number, (path, _) in enumerate(contents):
                (self._incoming / str(number)).rename(self._place(path))
            for path, file in wrong.items():
                if file.link:
                    self._place(path).symlink_to(file.link)
        except OSError as error:
            if error.errno in _FULL:
                raise _no_room(self.path, sum(file.size for _, file in contents)) from error
            raise
        finally:
            shutil.rmtree(self._incoming, ignore_errors=True)
        now = self.scan()
        for path, file in files.items():
            self._digests[path] = (now[path], file.sha256)
        return len(contents)

    def _has(self, path: str, file: StoredFile, sign: FileStamp | None) -> bool:
        if sign is None or sign.link != file.link:
            return False
        if file.link:
            return True
        if sign.size != file.size:
            return False
        digest = self.digest(path, sign)
        if digest is None:
            with (self.path / path).open("rb") as opened:
                digest = self.read_digest(path, sign, opened)
        return digest == file.sha256

    def _set_aside(self, paths: Sequence[str]) -> None:
        if paths:
            shutil.rmtree(self.aside, ignore_errors=True)
        for path in paths:
            target = self.aside / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.path / path).rename(target)
        # A folder without files would be taken for a checkpoint by its name.
        for folder, _, _ in os.walk(self.path, topdown=False):
            if Path(folder) != self.path:
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()

    def _place(self, path: str) -> Path:
        target = self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _scan(self, below: str) -> Iterator[tuple[str, FileStamp]]:
        try:
            entries = list(os.scandir(self.path / below))
        except (FileNotFoundError, NotADirectoryError):
            return  # not made yet, or just removed
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            try:
                path.encode()
                if entry.is_symlink():
                    if link := self._link(path):
                        yield path, _sign_of(entry.stat(follow_symlinks=False), link)
                elif entry.is_dir():
                    yield from self._scan(path)
                elif entry.is_file():
                    yield path, _sign_of(entry.stat())
            except UnicodeEncodeError:
                continue
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    def _link(self, path: str) -> str:
        """Where a symbolic link points, relative to its own folder; empty if that is out of the checkpoint folder."""
        target = (self.path / path).readlink()
        here = PurePosixPath(path).parent
        if target.is_absolute() and not target.is_relative_to(self.path):
            return ""
        inside = os.path.normpath(target.relative_to(self.path) if target.is_absolute() else here / target)
        return "" if inside == ".." or inside.startswith("../") else os.path.relpath(inside, here)


def open_for_writing(pids: Iterable[int], signs: Mapping[str, FileStamp]) -> set[str]:
    """Those of the files that one of these processes, or what they started, has open for writing. (Where there is no
    /proc: open at all.)"""
    by_inode = {(sign.device, sign.inode): path for path, sign in signs.items()}
    found = set()
    if not Path("/proc/self/fd").exists():
        return _open_at_all(pids, by_inode)
    for pid in _with_descendants(pids):
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    about = fd.stat()
                    path = by_inode.get((about.st_dev, about.st_ino))
                    if path is not None and _writes(pid, fd.name):
                        found.add(path)
    return found


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has waited for yet is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _open_at_all(pids: Iterable[int], by_inode: Mapping[tuple[int, int], str]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                for opened in each.open_files():
                    with contextlib.suppress(OSError):
                        about = Path(opened.path).stat()
                        found.add(by_inode.get((about.st_dev, about.st_ino), ""))
    return found - {""}


def _writes(pid: int, fd: str) -> bool:
    for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _with_descendants(pids: Iterable[int]) -> Iterator[int]:
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        yield pid
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += map(int, (thread / "children").read_text().split())


def _no_room(folder: Path, needed: int) -> GpuctlError:
    return GpuctlError(
        f"no space for the job's files on the disk of {folder}: {needed / 1e6:.1f} MB needed",
        "use machines with a larger disk, or have the script keep less",
    )


def _sign_of(about: os.stat_result, link: str = "") -> FileStamp:
    return FileStamp(about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, link)
