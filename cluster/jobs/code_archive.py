"""The working folder as one object: packed on the user's machine, unpacked on each node.

The same content gives the same tar, byte for byte (sorted names; no times, no owners), so its SHA-256 is its name and
it is uploaded once. The digest is that of the tar, not of the compressed file, which depends on the version of zstd.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, CorruptRecord
from gpuctl.cluster.jobs.code_survey import Item
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.upload import upload_file

_CHUNK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PackedCode:
    """A packed folder in a temporary file, which the caller deletes (see ``packed``)."""

    path: Path
    digest: str
    """SHA-256 of the tar inside."""
    bytes: int
    """Size of the compressed file."""
    files: int
    content_bytes: int


@contextlib.contextmanager
def packed(items: list[Item]) -> Iterator[PackedCode]:
    """Pack into a temporary file, gone at the end of the block. Memory stays bounded.

    Raises ``BadInput`` for a file that cannot be read or changes meanwhile.
    """
    import zstandard

    with tempfile.TemporaryDirectory(prefix="gpuctl-") as scratch:
        path = Path(scratch) / "code.tar.zst"
        with path.open("wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as zst:
            digest = _write_tar(items, zst)
        files = sum(not item.is_folder for item in items)
        yield PackedCode(path, digest, path.stat().st_size, files, sum(item.size for item in items))


def is_there(bucket: Bucket, digest: str) -> bool:
    """Whether the bucket has this very content."""
    try:
        bucket.get_range(layout.code(digest), 0, 1)
    except FileNotFoundError:
        return False
    return True


def upload(bucket: Bucket, code: PackedCode, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Send it; no harm is done if the bucket has it. ``on_bytes`` takes how many more were sent."""
    upload_file(bucket, layout.code(code.digest), code.path, on_bytes)


def unpack(source: bytes | Path, folder: Path, digest: str | None = None) -> None:
    """Unpack into ``folder``, which must be new or empty. Nothing in the archive can reach outside of it.

    ``digest``: what the tar inside must hash to. Raises ``CorruptRecord`` if it does not, or is no archive of ours.
    """
    import zstandard

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            compressed = source if isinstance(source, bytes) else stack.enter_context(source.open("rb"))
            reader = stack.enter_context(zstandard.ZstdDecompressor().stream_reader(compressed))
            hashing = _Hashing(reader)
            with tarfile.open(fileobj=cast(IO[bytes], hashing), mode="r|") as tar:
                for member in tar:
                    _extract(tar, member, folder)
            hashing.drain()
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise CorruptRecord(f"the packed code is damaged: {error}", "submit the job again") from error
    if digest is not None and hashing.hexdigest() != digest:
        raise CorruptRecord(f"the packed code differs from what was sent ({digest[:12]}…)", "submit the job again")


class _Hashing:
    """A stream that hashes what passes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        written: int = self._stream.write(data)
        return written

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self._digest.update(data)
        return data

    def drain(self) -> None:
        while self.read(_CHUNK_BYTES):
            pass

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _write_tar(items: list[Item], into: Any) -> str:
    hashing = _Hashing(into)
    with tarfile.open(fileobj=cast(IO[bytes], hashing), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for item in items:
            _add(tar, item)
    return hashing.hexdigest()


def _add(tar: tarfile.TarFile, item: Item) -> None:
    info = tarfile.TarInfo(item.name)
    info.mode = 0o755 if item.mode & stat.S_IXUSR else 0o644
    if item.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, item.link
        tar.addfile(info)
        return
    if item.is_folder:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
        return
    info.size = item.size
    try:
        with item.path.open("rb") as file:
            tar.addfile(info, file)
            changed = file.read(1) != b""
    except OSError as error:
        raise BadInput(f"cannot pack {item.name}: {error}", "fix it, or exclude it in .gitignore") from error
    if changed:
        raise BadInput(f"{item.name} grew while it was packed", "exclude files that are being written in .gitignore")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name, link = PurePosixPath(member.name), PurePosixPath(member.linkname)
    inside = not name.is_absolute() and ".." not in name.parts
    if member.issym():
        inside = inside and not link.is_absolute() and _is_inside(folder, name.parent)
        inside = (
            inside
            and PurePosixPath(os.path.normpath(name.parent / link)).parts[:1] != ("..",)
            and _is_inside(folder, name.parent / link)
        )
    else:
        inside = inside and _is_inside(folder, name)
    if not inside or not (member.isfile() or member.isdir() or member.issym()):
        raise tarfile.TarError(f"{member.name} cannot be part of a folder")
    if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later: the same once more
        tar.extract(member, folder, filter="data")
    else:
        tar.extract(member, folder)


def _is_inside(folder: Path, name: PurePosixPath) -> bool:
    """Through the links that have been unpacked so far."""
    return Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder))
