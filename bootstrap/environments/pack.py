"""An environment as a compressed tar, and back.

In it is what uv or rattler has installed. What belongs to the machine is not: the interpreter (but for conda's), its
``pyvenv.cfg``, and the file that shows it the node's own packages. Times are kept to the second, as Python knows by
them which source its bytecode was compiled from.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from gpuctl.bootstrap.environments import prefix
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.environments import PackedFiles

NODE_PACKAGES = "_gpuctl_node.pth"
"""In an environment's site-packages: adds the node's own, after its own."""
_OF_THE_MACHINE = frozenset({"pyvenv.cfg", "lib64", ".gitignore", "CACHEDIR.TAG", ".lock", "environment.json"})
_MARK = frozenset({"environment.json"})
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
    """Unpack what ``pack`` made into ``folder``. Nothing is written outside of it.

    The files are made by ``tar``, beside the decompression: of ten thousand small ones, Python takes three times as
    long.

    Raises ``CorruptRecord`` for what is no such archive, ``OSError``, and what ``chunks`` raises.
    """
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        with _tar(folder) as stream:
            for chunk in chunks:
                stream.write(unpacker.decompress(chunk))
        if not unpacker.eof:
            raise CorruptRecord("the packed environment is damaged: its end is missing")
    except zstandard.ZstdError as error:
        raise CorruptRecord(f"the packed environment is damaged: {error}") from error


@contextlib.contextmanager
def _tar(folder: Path) -> Iterator[IO[bytes]]:
    """Context in which what is written is unpacked into ``folder``. Members that would lie outside, also by a link, are
    refused by tar itself."""
    command = ["tar", "-x", "-f", "-", "-C", os.fspath(folder), "--no-same-owner", "--no-same-permissions"]
    with tempfile.TemporaryFile() as said:
        tar = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, env={**os.environ, "LC_ALL": "C"}
        )
        assert tar.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it says why
                yield tar.stdin
                tar.stdin.close()
            code = tar.wait()
        finally:
            tar.kill()
            tar.wait()
            with contextlib.suppress(BrokenPipeError):
                tar.stdin.close()
        said.seek(0)
        words = said.read().decode(errors="replace")
    if "No space left on device" in words:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(folder))
    if code:
        why = next((line for line in words.splitlines() if line.strip()), f"tar ended with {code}")
        raise CorruptRecord(f"the packed environment is damaged: {why}")


def size_of(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files, without bytecode."""
    sizes = [path.lstat().st_size for path in files_of(folder)]
    return sum(sizes), len(sizes)


def _walk(folder: Path) -> Iterator[Path]:
    has_own_python = prefix.has_one(folder)
    not_packed = _MARK if has_own_python else _OF_THE_MACHINE
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        is_top, is_bin = here == folder, here == folder / "bin" and not has_own_python
        files += [name for name in folders if (here / name).is_symlink()]
        folders[:] = sorted(name for name in folders if not (is_top and name in not_packed))
        for name in sorted(files):
            is_own = (is_top and name in not_packed) or name == NODE_PACKAGES
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
