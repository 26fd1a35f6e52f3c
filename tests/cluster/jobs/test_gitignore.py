"""``.gitignore`` means what it means to git: compared with git itself, on chosen files and on random ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuctl.cluster.jobs.code_survey import survey

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

FILES = [
    "a.py",
    "b.py",
    "a.log",
    "keep.log",
    "x.tmp",
    "1.txt",
    "trailing ",
    "#odd",
    "!odd",
    "ab",
    "a]b",
    "a-b",
    "build/o",
]
FILES += ["data/d", "sub/a.py", "sub/b.py", "sub/keep.log", "sub/n.txt", "sub/build/o", "sub/deep/a.py", "sub/deep/ab"]

CASES: dict[str, dict[str, str]] = {
    "*.log\n!keep.log\n/build/\ndata/\n": {},
    "# comment\n\n*.tmp\nsub/*.txt\n**/deep/\n": {},
    "*\n!*.py\n!*/\n": {},
    "*\n!sub/\n": {},
    "/sub\n": {},
    "sub/*\n!sub/keep.log\n": {"sub/.gitignore": "*.py\n!a.py\n"},
    "*.py\n": {"sub/.gitignore": "!*.py\n"},
    "trailing\\ \n\\#odd\n\\!odd\n": {},
    "trailing \n": {},
    "*.py   \r\n": {},
    "sub/deep\n": {"sub/.gitignore": "!deep\n"},
    "[ab].py\n?.txt\n": {},
    "a[]-]b\n": {},
    "a[!-]b\n[[:digit:]].txt\n": {},
    "a[b\nab\\\n": {},
    "sub/**\n!sub/**/\n!sub/**/*.py\n": {},
    "sub/**/ab\n**/n.txt\nsub/a**\n": {},
    "/\n!\n//\n": {},
    "build\n!build/o\n": {},
    "sub?a.py\nsub[/]b.py\n": {},
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plant(tmp_path)


def plant(folder: Path) -> Path:
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def ours(folder: Path) -> set[str]:
    return {item.name for item in survey(folder) if not item.is_folder}


def gits(folder: Path) -> set[str]:
    listed = subprocess.run(
        ["git", "-c", "core.excludesFile=", "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
    ).stdout.decode()
    return set(listed.split("\0")) - {""}


@pytest.mark.parametrize("ignore", CASES)
def test_what_is_left_out_is_what_git_leaves_out(tree: Path, ignore: str) -> None:
    for name, text in {".gitignore": ignore, **CASES[ignore]}.items():
        (tree / name).write_text(text, newline="")
    assert ours(tree) == gits(tree)


@pytest.fixture(scope="module")
def shared_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield plant(Path(folder).resolve())


PIECES = [
    "*",
    "**",
    "?",
    "/",
    "a",
    "b",
    ".py",
    "sub",
    "deep",
    "!",
    "\\",
    "[ab]",
    "[!a]",
    "[a-",
    "]",
    " ",
    "#",
    "ab",
    "o",
]
LINES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(LINES, max_size=4), inner=st.lists(LINES, max_size=2))
def test_random_files_mean_the_same_as_to_git(shared_tree: Path, lines: list[str], inner: list[str]) -> None:
    (shared_tree / ".gitignore").write_text("\n".join(lines))
    (shared_tree / "sub" / ".gitignore").write_text("\n".join(inner))
    assert ours(shared_tree) == gits(shared_tree)
