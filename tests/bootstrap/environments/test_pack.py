"""An environment as an archive: what is in it, and that nothing in one reaches outside."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from gpuctl.bootstrap.environments import pack
from gpuctl.cluster.errors import CorruptRecord

SITE = "lib/python3.11/site-packages"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    folder = tmp_path / "environment"
    for name, text in {
        f"{SITE}/mine/__init__.py": "VALUE = 1\n",
        f"{SITE}/mine/{'deep/' * 20}leaf.py": "",
        f"{SITE}/mine/__pycache__/__init__.cpython-311.pyc": "compiled",
        f"{SITE}/{pack.NODE_PACKAGES}": "import site",
        f"{SITE}/mine.libs/libx.so.1": "x" * 3_000_000,
        "bin/tool": "#!/bin/sh\n",
        "bin/activate": "",
        "pyvenv.cfg": "home = /usr/bin\n",
        "environment.json": "{}",
        "share/man/tool.1": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin" / "tool").chmod(0o755)
    (folder / "bin" / "python").symlink_to("/usr/bin/python3")
    (folder / SITE / "mine.libs" / "libx.so").symlink_to("libx.so.1")
    os.utime(folder / SITE / "mine" / "__init__.py", (1_600_000_000.7, 1_600_000_000.7))
    return folder


def packed(folder: Path, archive: Path) -> Path:
    made = pack.pack(folder, pack.files_of(folder), archive)
    assert made.bytes == archive.stat().st_size
    return archive


def test_what_was_installed_comes_out_again_and_what_belongs_to_the_machine_does_not(
    environment: Path, tmp_path: Path
) -> None:
    archive = packed(environment, tmp_path / "a.tar.zst")
    out = tmp_path / "out"
    out.mkdir()
    pack.unpack([archive.read_bytes()], out)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert names == {
        f"{SITE}/mine/__init__.py",
        f"{SITE}/mine/{'deep/' * 20}leaf.py",
        f"{SITE}/mine.libs/libx.so.1",
        f"{SITE}/mine.libs/libx.so",
        "bin/tool",
        "share/man/tool.1",
    }
    assert os.access(out / "bin" / "tool", os.X_OK)
    assert not os.access(out / SITE / "mine" / "__init__.py", os.X_OK)
    assert (out / SITE / "mine.libs" / "libx.so").readlink() == Path("libx.so.1")
    assert (out / SITE / "mine.libs" / "libx.so.1").read_text() == "x" * 3_000_000
    # Python compares the whole seconds with those in its bytecode.
    assert (out / SITE / "mine" / "__init__.py").stat().st_mtime == 1_600_000_000
    assert pack.size_of(out) == pack.size_of(environment)


def test_bytecode_is_packed_by_itself_and_python_takes_it_for_its_own(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder, out = tmp_path / "environment", tmp_path / "out"
    module = folder / SITE / "mine.py"
    module.parent.mkdir(parents=True)
    module.write_text("VALUE = 1\n")
    os.utime(module, (1_600_000_000, 1_600_000_000))
    run = [sys.executable, "-v", "-c", "import mine"]
    env = {"PATH": os.environ["PATH"]}
    subprocess.run(run, env={**env, "PYTHONPATH": str(module.parent)}, check=True, capture_output=True)
    out.mkdir()
    for number, files in enumerate((pack.files_of(folder), pack.bytecode_of(folder))):
        archive = tmp_path / f"{number}.tar.zst"
        pack.pack(folder, files, archive)
        pack.unpack([archive.read_bytes()], out)
    told = subprocess.run(
        run, env={**env, "PYTHONPATH": str(out / SITE)}, check=True, capture_output=True, text=True
    ).stderr
    assert f"matches {out / SITE / 'mine.py'}" in told


@pytest.mark.parametrize("piece", [1, 1000, 1 << 20])
def test_pieces_of_any_size_make_it_up(environment: Path, tmp_path: Path, piece: int) -> None:
    (environment / SITE / "mine.libs" / "libx.so.1").write_text("small")
    data = packed(environment, tmp_path / "a.tar.zst").read_bytes()
    out = tmp_path / "out"
    out.mkdir()
    pack.unpack([data[at : at + piece] for at in range(0, len(data), piece)], out)
    assert pack.size_of(out) == pack.size_of(environment)


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return zstandard.compress(raw.getvalue())


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info, b""


def file(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), b"x"


@pytest.mark.parametrize(
    "members",
    [
        [file("../outside")],
        [file("in/../../outside")],
        [file("/{}/outside")],
        [link("lib", "../.."), file("lib/outside")],
        [link("lib", "{}"), file("lib/outside")],
        [link("lib", "sub"), link("sub", ".."), file("lib/outside")],
        [link("outside", "{}/outside"), file("outside")],
    ],
)
def test_nothing_is_written_outside(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    out = tmp_path / "in" / "out"
    out.mkdir(parents=True)
    for info, _ in members:
        info.name, info.linkname = (text.replace("{}", str(tmp_path)) for text in (info.name, info.linkname))
    with contextlib.suppress(CorruptRecord):
        pack.unpack([archive_of(*members)], out)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["out"]


@pytest.mark.parametrize("data", [b"", b"no archive", zstandard.compress(b"no tar" * 1000)])
def test_what_is_no_archive_is_damaged(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorruptRecord, match="damaged"):
        pack.unpack([data], tmp_path)


def test_a_fetch_that_fails_ends_tar_with_it(environment: Path, tmp_path: Path) -> None:
    data = packed(environment, tmp_path / "a.tar.zst").read_bytes()
    out = tmp_path / "out"
    out.mkdir()

    def pieces() -> Iterator[bytes]:
        yield data[:1000]
        raise ConnectionError("the other node has left")

    with pytest.raises(ConnectionError, match="has left"):
        pack.unpack(pieces(), out)


def test_an_archive_that_is_cut_short_is_damaged(environment: Path, tmp_path: Path) -> None:
    data = packed(environment, tmp_path / "a.tar.zst").read_bytes()
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CorruptRecord, match="damaged"):
        pack.unpack([data[: len(data) // 2]], out)


def test_a_disk_without_room_leaves_no_archive(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        pack.pack(environment, _failing(environment), tmp_path / "a.tar.zst")
    assert [path.name for path in tmp_path.iterdir()] == ["environment"]


def _failing(folder: Path):  # type: ignore[no-untyped-def]
    yield next(pack.files_of(folder))
    raise OSError(28, "No space left on device")
