"""The working folder as one object: what goes in, the same bytes for the same content, and a safe way out."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, CorruptRecord
from gpuctl.cluster.jobs.code_archive import PackedCode, is_there, packed, unpack, upload
from gpuctl.cluster.jobs.code_survey import look_over, survey
from gpuctl.cluster.storage.bucket import open_bucket


def write(folder: Path, **files: str) -> Path:
    """``a__b`` is ``a/b``, ``_gitignore`` is ``.gitignore``; a ``.py`` is added where there is no dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_gitignore", ".gitignore")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> set[str]:
    return {item.name for item in survey(folder) if not item.is_folder}


def pack_once(folder: Path) -> tuple[str, bytes]:
    with packed(survey(folder)) as code:
        return code.digest, code.path.read_bytes()


def test_the_same_content_has_the_same_digest_whatever_its_times_and_owners(tmp_path: Path) -> None:
    one = write(tmp_path / "one", b="2", a="1", sub__c="3")
    two = write(tmp_path / "two", sub__c="3", a="1", b="2")
    os.utime(two / "a", (1, 1))
    assert pack_once(one)[0] == pack_once(two)[0]
    (two / "a").chmod(0o755)
    assert pack_once(one)[0] != pack_once(two)[0]


def test_items_come_by_name_and_not_as_the_disk_has_them(tmp_path: Path) -> None:
    write(tmp_path, **{f"{letter}{i}__x": "" for i in (3, 1, 2) for letter in "zam"}, b="")
    found = [item.name for item in survey(tmp_path)]
    assert found == sorted(found)
    assert len(found) == 19


def test_other_content_has_another_digest(tmp_path: Path) -> None:
    digests = {pack_once(write(tmp_path / text, a=text))[0] for text in ("x", "y")}
    digests.add(pack_once(write(tmp_path / "z", b="x"))[0])
    assert len(digests) == 3


def test_what_was_packed_comes_out_as_it_was(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", train="print(1)", pkg__deep__mod="x")
    (folder / "run.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("pkg/deep")
    (folder / "pkg" / "up").symlink_to("../train")
    (folder / "absolute").symlink_to(folder / "train")
    digest, data = pack_once(folder)
    unpack(data, tmp_path / "out", digest)
    out = tmp_path / "out"
    assert (out / "train").read_text() == "print(1)"
    assert (out / "link" / "mod").read_text() == "x"
    assert (out / "pkg" / "up").read_text() == "print(1)"
    assert (out / "absolute").readlink() == Path("train")
    assert os.access(out / "run.sh", os.X_OK)
    assert (out / "empty").is_dir()
    assert pack_once(out)[0] == digest


def test_git_bytecode_and_virtual_environments_are_always_left_out(tmp_path: Path) -> None:
    for folder in (".git", ".venv", "sub/__pycache__"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "inside").touch()
    (tmp_path / "a.py").touch()
    assert not [name for name in names(tmp_path) if "inside" in name]
    assert "a.py" in names(tmp_path)


def test_a_folder_below_the_top_of_a_repository_obeys_the_files_above_it(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    write(tmp_path, _gitignore="*.ckpt\n/examples/out/\n", examples__a="", examples__out__b="")
    (tmp_path / "examples" / "x.ckpt").touch()
    assert names(tmp_path / "examples") == {"a"}


def test_a_folder_that_a_file_above_leaves_out_is_still_packed(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    write(tmp_path, _gitignore="scratch/\n", scratch__a="", scratch__b__c="")
    assert names(tmp_path / "scratch") == {"a", "b/c"}
    assert names(tmp_path / "scratch" / "b") == {"c"}


def test_a_file_above_that_is_of_no_repository_counts_for_nothing(tmp_path: Path) -> None:
    write(tmp_path, _gitignore="*\n", inner__a="")
    assert names(tmp_path / "inner") == {"a"}


def test_keys_and_passwords_are_left_out_and_named(tmp_path: Path) -> None:
    secrets = [".env", ".env.prod", "key.pem", "a/id_ed25519", "a/.netrc", "credentials.json", ".git-credentials"]
    secrets += [
        ".npmrc",
        *(f"a/{folder}/token" for folder in (".cache/huggingface", ".config/huggingface", ".huggingface")),
    ]
    folders = [".ssh/config", ".aws/credentials", ".kube/config", ".azure/tokens", "home/.config/gcloud/x.db"]
    plain = [".env.example", "id_map.py", "a/id_ed25519.pub", "environment.yml", "credentials.py", ".config/x"]
    for name in (*secrets, *folders, *plain):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = look_over(tmp_path)
    assert {item.name for item in found.items if not item.is_folder} == set(plain)
    named = [".aws/", ".azure/", ".kube/", ".ssh/", "home/.config/gcloud/"]
    assert sorted(found.private) == sorted([*secrets, *named])


@pytest.mark.parametrize("file", [".gitignore", ".gpuctlignore"])
def test_a_secret_is_sent_if_a_line_asks_for_it(tmp_path: Path, file: str) -> None:
    write(tmp_path, a__b="")
    (tmp_path / ".env").touch()
    (tmp_path / "a" / ".env").touch()
    (tmp_path / file).write_text("!/.env\n")
    assert names(tmp_path) == {"a/b", ".env", file}
    assert look_over(tmp_path).private == ["a/.env"]


def test_what_git_does_not_know_may_be_sent_and_the_reverse(tmp_path: Path) -> None:
    write(tmp_path, _gitignore="data/\n.env\n", data__x="", big="")
    (tmp_path / ".env").touch()
    assert look_over(tmp_path).private == []
    (tmp_path / ".gpuctlignore").write_text("!data/\nbig\n")
    assert names(tmp_path) == {"data/x", ".gitignore", ".gpuctlignore"}


def test_a_folder_apart_is_left_out_whatever_the_rules_say(tmp_path: Path) -> None:
    write(tmp_path, _gitignore="!state/\n", state__x="", a="")
    assert {item.name for item in look_over(tmp_path, apart=tmp_path / "state").items} == {"a", ".gitignore"}


def test_links_that_lead_back_to_themselves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(BadInput, match=r"the link [ab] leads back to itself; delete it, or exclude it in .gitignore"):
        survey(tmp_path)


def test_too_much_is_refused_with_the_largest_files(tmp_path: Path) -> None:
    write(tmp_path, small="x", sub__large="y" * 3_000_000, medium="z" * 2_000_000)
    with pytest.raises(
        BadInput, match=r"5\.0 MB, more than the limit of 4\.0 MB.*: sub/large \(3\.0 MB\), medium"
    ) as error:
        survey(tmp_path, limit=4_000_000)
    assert ".gitignore" in error.value.hint
    write(tmp_path, _gitignore="large\n")
    assert names(tmp_path) == {"small", "medium", ".gitignore"}


def test_the_limit_is_500_megabytes(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(500_000_001)
    with pytest.raises(BadInput, match=r"500 MB, more than the limit of 500 MB.*: sparse \(500 MB\)"):
        survey(tmp_path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside"])
def test_a_link_to_the_outside_is_refused_by_name(tmp_path: Path, target: str) -> None:
    folder = write(tmp_path / "in", sub__a="")
    (tmp_path / "outside").touch()
    (folder / "sub" / "leak").symlink_to(target if target.startswith("/") else f"../{target}")
    with pytest.raises(BadInput, match="the link sub/leak points outside"):
        survey(folder)


def test_a_link_through_a_link_to_the_outside_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", sub__a="", _gitignore="door\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").touch()
    (folder / "door").symlink_to(tmp_path / "outside")
    (folder / "innocent").symlink_to("door/secret")
    with pytest.raises(BadInput, match="the link innocent points outside"):
        survey(folder)


def test_a_link_that_git_leaves_out_may_point_anywhere(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a="", _gitignore="data\n")
    (folder / "data").symlink_to("/srv/data")
    assert names(folder) == {"a", ".gitignore"}


def test_pipes_and_sockets_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").touch()
    assert names(tmp_path) == {"a"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(0o000)
    with pytest.raises(BadInput, match="cannot pack secret"):
        pack_once(tmp_path)


@pytest.mark.parametrize("change", ["longer", "shorter", "gone"])
def test_a_file_that_changes_meanwhile_is_named(tmp_path: Path, change: str) -> None:
    (tmp_path / "log").write_text("x" * 1000)
    items = survey(tmp_path)
    if change == "gone":
        (tmp_path / "log").unlink()
    else:
        (tmp_path / "log").write_text("x" * (2000 if change == "longer" else 10))
    with pytest.raises(BadInput, match="log"), packed(items):
        pass


def test_the_same_content_is_uploaded_once(tmp_path: Path, bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    write(tmp_path / "in", a="1")
    with packed(survey(tmp_path / "in")) as code:
        sent: list[int] = []
        assert not is_there(bucket, code.digest)
        upload(bucket, code, sent.append)
        assert is_there(bucket, code.digest)
        assert sum(sent) == code.bytes
        assert bucket.get(layout.code(code.digest)) == code.path.read_bytes()
        upload(bucket, PackedCode(tmp_path / "in" / "a", code.digest, 1, 1, 1))
        assert bucket.get(layout.code(code.digest)) == code.path.read_bytes(), "what is there is not written over"


@pytest.mark.slow
def test_a_large_folder_goes_up_in_parts(tmp_path: Path, bucket_url: str) -> None:
    bucket = open_bucket(bucket_url)
    noise = os.urandom(40_000_000)
    (tmp_path / "noise").write_bytes(noise)
    sent: list[int] = []
    with packed(survey(tmp_path)) as code:
        upload(bucket, code, sent.append)
        assert len(sent) > 1
        assert sum(sent) == code.bytes
        there = bucket.get(layout.code(code.digest))
    assert there is not None
    unpack(there, tmp_path / "out", code.digest)
    assert (tmp_path / "out" / "noise").read_bytes() == noise


_PACK_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from gpuctl.cluster.jobs.code_archive import packed, unpack
from gpuctl.cluster.jobs.code_survey import survey
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with packed(survey(Path(sys.argv[1]))) as code:
    unpack(code.path, Path(sys.argv[2]), code.digest)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_packing_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "noise").write_bytes(os.urandom(1_000_000) * 200)
    done = subprocess.run(
        [sys.executable, "-c", _PACK_IN_LITTLE_MEMORY, str(tmp_path / "in"), str(tmp_path / "out")],
        check=True,
        capture_output=True,
        text=True,
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 60_000_000
    assert resource.RLIM_INFINITY  # the module is there on every platform we run on


def archive(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        fill(tar)
    return zstandard.ZstdCompressor().compress(raw.getvalue())


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[tarfile.TarFile], None]:
    def fill(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        tar.addfile(info)

    return fill


@pytest.mark.parametrize(
    "fill",
    [
        member("/tmp/evil"),
        member("../evil"),
        member("a/../../evil"),
        member("evil", tarfile.SYMTYPE, "/etc/passwd"),
        member("evil", tarfile.SYMTYPE, "../outside"),
        member("evil", tarfile.LNKTYPE, "../outside"),
        member("evil", tarfile.CHRTYPE),
        member("evil", tarfile.FIFOTYPE),
    ],
)
def test_an_archive_that_reaches_outside_is_refused(tmp_path: Path, fill: Callable[[tarfile.TarFile], None]) -> None:
    with pytest.raises(CorruptRecord, match="damaged"):
        unpack(archive(fill), tmp_path / "in" / "folder")
    assert not (tmp_path / "in" / "evil").exists()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("filtered", [True, False], ids=["this Python", "one before 3.11.4"])
@pytest.mark.parametrize(
    "links",
    [
        [("a", "."), ("a/b", "..")],
        [("a/b", "x/.."), ("a/x", ".."), ("a/c", "b/..")],
        [("b", "x/.."), ("x", ".")],
    ],
)
def test_a_chain_of_links_does_not_reach_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: list[tuple[str, str]], filtered: bool
) -> None:
    if not filtered:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)

    def fill(tar: tarfile.TarFile) -> None:
        for name, target in links:
            member(name, tarfile.SYMTYPE, target)(tar)
        for name, _ in links:
            member(f"{name}/evil")(tar)

    with contextlib.suppress(CorruptRecord):  # later Pythons let them lead to somewhere inside
        unpack(archive(fill), tmp_path / "in" / "folder")
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["folder"]


def test_links_with_dots_and_behind_other_links_lead_where_they_did(tmp_path: Path) -> None:
    """``..data`` is how Kubernetes lays out its volumes."""
    folder = write(tmp_path / "in", sub__x="right", x="wrong")
    (folder / "..data").mkdir()
    (folder / "..data" / "c").write_text("data")
    (folder / "config").symlink_to("..data/c")
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "d").symlink_to("sub/deep")
    (folder / "l").symlink_to("d/../x")
    unpack(pack_once(folder)[1], tmp_path / "out")
    assert (tmp_path / "out" / "config").read_text() == "data"
    assert (tmp_path / "out" / "l").read_text() == "right"


def test_a_damaged_or_exchanged_archive_is_refused(tmp_path: Path) -> None:
    digest, data = pack_once(write(tmp_path / "one", a="1" * 10_000))
    _, other = pack_once(write(tmp_path / "two", a="2"))
    for bad, said in ((data[:-20], "damaged"), (b"nonsense", "damaged"), (other, "differs from what was sent")):
        with pytest.raises(CorruptRecord, match=said):
            unpack(bad, tmp_path / f"out-{said}-{len(bad)}", digest)
