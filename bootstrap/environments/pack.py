"""An environment as a compressed tar, and back.

In it is what uv or rattler has installed. What belongs to the machine is not: the interpreter (but for conda's), its
``pyvenv.cfg``, and the file that shows it the node's own packages. Times are kept to the second, as Python knows by
them which source its bytecode was compiled from.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from gpuctl.bootstrap.environments import prefix
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.environments import PackedFiles

NODE_PACKAGES = "_gpuctl_node.pth"
"""In an environment's site-packages: adds the node's own, after its own."""
_OF_THE_MACHINE = frozenset({"pyvenv.cfg", "lib64", ".gitignore", "CACHEDIR.TAG", ".lock", "environment.json"})
_CACHE = "__pycache__"
_LEVEL = 3
_READ_BYTES = 1 << 20


def files_of(folder: Path) -> Iterator[Path]:
    """The files that make up the environment, without bytecode."""
    for path in _walk(folder):
        if path.parent.name != _CACHE:
            yield path


def bytecode_of(folder: Path) -> Iterator[Path]:
    """What Python has compiled there so far."""
    for path in _walk(folder):
        if path.parent.name == _CACHE and path.suffix == ".pyc":
            yield path


def pack(folder: Path, files: Iterable[Path], archive: Path) -> PackedFiles:
    """Pack ``files``, which lie in ``folder``. Raises ``OSError``, and then there is no archive."""
    import zstandard

    partial = archive.with_name(f"{archive.name}.part")
    try:
        with partial.open("wb") as file:
            hashing = _HashingWriter(file)
            compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=-1)
            with compressor.stream_writer(cast(IO[bytes], hashing), closefd=False) as stream:
                _write_tar(folder, files, cast(IO[bytes], stream))
            size = file.tell()
        partial.rename(archive)
    finally:
        partial.unlink(missing_ok=True)
    return PackedFiles(sha256=hashing.sha256.hexdigest(), bytes=size)


def unpack(chunks: Iterable[bytes | memoryview], folder: Path) -> None:
    """Unpack what ``pack`` made into ``folder``. Nothing in it can reach outside.

    Raises ``CorruptRecord`` for what is no such archive, ``OSError``, and what ``chunks`` raises.
    """
    import zstandard

    source = _Chunks(chunks)
    made: set[PurePosixPath] = set()
    try:
        with zstandard.ZstdDecompressor().stream_reader(cast(IO[bytes], source)) as stream:
            with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=_READ_BYTES) as tar:
                for member in tar:
                    _extract(tar, member, folder, made)
            while stream.read(_READ_BYTES):  # its checksum comes last
                pass
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise CorruptRecord(f"the packed environment is damaged: {error}") from error
    for _ in source.rest():
        pass


def size_of(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files, without bytecode."""
    sizes = [path.lstat().st_size for path in files_of(folder)]
    return sum(sizes), len(sizes)


def _walk(folder: Path) -> Iterator[Path]:
    has_own_python = prefix.has_one(folder)
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        is_top, is_bin = here == folder, here == folder / "bin" and not has_own_python
        folders[:] = sorted(name for name in folders if not (is_top and name in _OF_THE_MACHINE))
        for name in sorted(files):
            is_own = (is_top and name in _OF_THE_MACHINE) or name == NODE_PACKAGES
            if not is_own and not (is_bin and (name.startswith(("python", "activate", "deactivate", "pydoc.bat")))):
                yield here / name


def _write_tar(folder: Path, files: Iterable[Path], stream: IO[bytes]) -> None:
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=_READ_BYTES) as tar:
        for path in files:
            status = path.lstat()
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
            info.mtime = int(status.st_mtime)
            if stat.S_ISLNK(status.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.fspath(path.readlink())
                tar.addfile(info)
            elif stat.S_ISREG(status.st_mode):
                info.size = status.st_size
                with path.open("rb") as file:
                    tar.addfile(info, file)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, made: set[PurePosixPath]) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or not (member.isfile() or member.issym()):
        raise tarfile.TarError(f"{member.name} cannot be part of an environment")
    path = folder / name
    if name.parent not in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.update(name.parents)
    if member.issym():
        link = PurePosixPath(os.path.normpath(name.parent / member.linkname))
        if link.is_absolute() or link.parts[:1] == ("..",):
            raise tarfile.TarError(f"{member.name} points outside")
        path.symlink_to(member.linkname)
        return
    content = tar.extractfile(member)
    assert content is not None
    # Not tar.extract, which asks for owners, rights and links of each: half of the time of ten thousand small files.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, member.mode & 0o755)
    try:
        while data := content.read(_READ_BYTES):
            _write(descriptor, data)
        os.utime(descriptor, (member.mtime, member.mtime))
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class _HashingWriter:
    """A file that hashes what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._file = file

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class _Chunks:
    """Chunks as a file that is read from."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = iter(chunks)
        self._left = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        while not self._left:
            following = next(self._chunks, None)
            if following is None:
                return b""
            self._left = memoryview(following)
        size = len(self._left) if size < 0 else size
        data, self._left = bytes(self._left[:size]), self._left[size:]
        return data

    def rest(self) -> Iterator[bytes | memoryview]:
        """What was not read."""
        yield self._left
        yield from self._chunks
