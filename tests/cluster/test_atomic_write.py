"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from gpuctl.cluster.atomic_write import write_atomic


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may have more than 64 KiB, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _write_often(path: Path, data: bytes) -> None:
    for _ in range(40):
        write_atomic(path, data)


def test_a_reader_sees_one_writer_or_another_and_never_half(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    texts = [letter * (1 << 20) for letter in (b"a", b"b")]
    write_atomic(path, texts[0])
    writers = [Thread(target=_write_often, args=(path, text)) for text in texts]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in texts
        seen += 1
    assert seen > 3 and [each.name for each in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.usefixtures("small_files")
def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"before")
    with pytest.raises(OSError, match="too large") as refused:
        write_atomic(path, bytes(1 << 20))
    assert refused.value.filename == str(path)
    assert path.read_bytes() == b"before" and [each.name for each in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("durable", [False, True])
def test_permissions_are_the_ones_asked_for_or_the_umask_s(tmp_path: Path, durable: bool) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "plain", b"", durable=durable)
        write_atomic(tmp_path / "secret", b"", mode=0o600, durable=durable)
        write_atomic(tmp_path / "open", b"", mode=0o644, durable=durable)
    finally:
        os.umask(before)
    assert [_permissions(tmp_path / name) for name in ("plain", "secret", "open")] == [0o640, 0o600, 0o644]
