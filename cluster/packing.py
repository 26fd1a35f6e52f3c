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
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import BadInput, CorruptRecord, StoreUnavailable
from gpuctl.cluster.ignore import Rules, rules_of
from gpuctl.cluster.refusals import shown

LIMIT_BYTES = 500_000_000
"""Of the files before compression: beyond it something is in the folder that is not code."""
NEVER_PACKED = frozenset({".git", "__pycache__", ".venv"})

_CHUNK_BYTES = 8 * 1024 * 1024
_ONE_PUT_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Item:
    """One file, folder or link to pack. ``name`` is relative, with forward slashes."""

    name: str
    path: Path
    size: int
    mode: int
    link: str | None = None
    """Target of a symbolic link, relative to the folder that holds it."""

    @property
    def is_folder(self) -> bool:
        return self.link is None and stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed folder in a temporary file, which the caller deletes (see ``packed``)."""

    path: Path
    digest: str
    """SHA-256 of the tar inside."""
    bytes: int
    """Size of the compressed file."""
    files: int
    content_bytes: int


def survey(folder: Path, limit: int = LIMIT_BYTES) -> list[Item]:
    """What would be packed: all of ``folder`` but what ``.gitignore`` files and ``NEVER_PACKED`` leave out, by name.

    Raises ``BadInput`` over ``limit`` bytes (naming the largest files) and for a link that points outside.
    """
    root = folder.resolve()
    items = sorted(_walk(root, root, _rules_above(root)), key=lambda item: item.name)
    total = sum(item.size for item in items)
    if total > limit:
        largest = sorted(items, key=lambda item: -item.size)[:5]
        names = ", ".join(f"{item.name} ({_megabytes(item.size)})" for item in largest if item.size)
        raise BadInput(
            f"the folder {root} holds {_megabytes(total)}, more than the {_megabytes(limit)} that are sent; "
            f"the largest files: {names}",
            "name what the script does not need in .gitignore",
        )
    return items


@contextlib.contextmanager
def packed(items: list[Item]) -> Iterator[Packed]:
    """Pack into a temporary file, gone at the end of the block. Memory stays bounded.

    Raises ``BadInput`` for a file that cannot be read or changes meanwhile.
    """
    import zstandard

    with tempfile.TemporaryDirectory(prefix="gpuctl-") as scratch:
        path = Path(scratch) / "code.tar.zst"
        with path.open("wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as zst:
            digest = _write_tar(items, zst)
        files = sum(not item.is_folder for item in items)
        yield Packed(path, digest, path.stat().st_size, files, sum(item.size for item in items))


def is_there(bucket: Bucket, digest: str) -> bool:
    """Whether the bucket has this very content."""
    try:
        bucket.get_range(layout.code(digest), 0, 1)
    except FileNotFoundError:
        return False
    return True


def upload(bucket: Bucket, code: Packed, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Send it; no harm is done if the bucket has it. ``on_bytes`` takes how many more were sent."""
    key = layout.code(code.digest)
    if code.bytes > _ONE_PUT_BYTES:
        _stream(bucket, key, code.path, on_bytes)
        return
    bucket.create(key, code.path.read_bytes())
    on_bytes(code.bytes)


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
        raise CorruptRecord(f"the packed code is not what was sent ({digest[:12]}…)", "submit the job again")


# -- what goes in -----------------------------------------------------------------------------------------------------


def _walk(root: Path, folder: Path, rules: tuple[Rules, ...]) -> Iterator[Item]:
    rules = (*rules, *rules_of(folder))
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise BadInput(f"cannot read {folder}: {error.strerror}", "mend it, or name it in .gitignore") from error
    for entry in entries:
        path = Path(entry.path)
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in NEVER_PACKED or _is_ignored(path, is_folder, rules):
            continue
        info = entry.stat(follow_symlinks=False)
        name = path.relative_to(root).as_posix()
        if entry.is_symlink():
            yield Item(name, path, 0, info.st_mode, _link_inside(root, path, name))
        elif is_folder:
            yield Item(name, path, 0, info.st_mode)
            yield from _walk(root, path, rules)
        elif entry.is_file(follow_symlinks=False):
            yield Item(name, path, info.st_size, info.st_mode)
        # sockets, pipes and devices are nobody's code


def _is_ignored(path: Path, is_folder: bool, rules: tuple[Rules, ...]) -> bool:
    """The innermost .gitignore with an opinion decides. A folder that is left out is never looked into."""
    verdicts = (rule.verdict(path, is_folder) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _rules_above(root: Path) -> tuple[Rules, ...]:
    """Those of the folders between ``root`` and the top of its git work tree, unless they leave out ``root`` itself."""
    above = list(root.parents)
    top = next((i for i, folder in enumerate([root, *above]) if (folder / ".git").exists()), 0)
    rules = tuple(rule for folder in reversed(above[:top]) for rule in rules_of(folder))
    return () if any(_is_ignored(p, True, rules) for p in (root, *above[: max(0, top - 1)]) if rules) else rules


def _link_inside(root: Path, path: Path, name: str) -> str:
    target = Path(os.path.normpath(path.parent / path.readlink()))
    if not target.is_relative_to(root) or not path.resolve().is_relative_to(root):
        raise BadInput(
            f"the link {name} points outside of the folder, to {path.readlink()}",
            "copy what it points to, or name it in .gitignore",
        )
    return Path(os.path.relpath(target, path.parent)).as_posix()


# -- how it is written ------------------------------------------------------------------------------------------------


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
        raise BadInput(f"cannot pack {item.name}: {error}", "mend it, or name it in .gitignore") from error
    if changed:
        raise BadInput(f"{item.name} grew while it was packed", "name files that are being written in .gitignore")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name, link = PurePosixPath(member.name), PurePosixPath(member.linkname)
    inside = not name.is_absolute() and ".." not in name.parts
    if member.issym():
        inside = inside and not link.is_absolute() and not os.path.normpath(name.parent / link).startswith("..")
    if not inside or not (member.isfile() or member.isdir() or member.issym()):
        raise tarfile.TarError(f"{member.name} does not belong into a folder")
    if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later: the same once more, and links that form chains
        tar.extract(member, folder, filter="data")
    else:
        tar.extract(member, folder)


def _stream(bucket: Bucket, key: str, path: Path, on_bytes: Callable[[int], None]) -> None:
    """In parts, so that a slow line needs no single long request. Not create-only: the name is the content."""
    import obstore
    from obstore.exceptions import BaseError

    def chunks(file: IO[bytes]) -> Iterator[bytes]:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
            on_bytes(len(chunk))

    with path.open("rb") as file:
        try:
            obstore.put(bucket.raw, key, chunks(file), chunk_size=_CHUNK_BYTES)
        except (BaseError, OSError) as error:
            reason = str(error).split("\n", 1)[0]
            raise StoreUnavailable(f"the upload to {shown(bucket.url)} broke off: {reason}", "try again") from error


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
