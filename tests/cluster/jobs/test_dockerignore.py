"""``.dockerignore`` means what it means to Docker."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster.jobs.code_survey import look_over
from gpuctl.cluster.jobs.dockerignore import DockerIgnore

_FILES = ("Dockerfile", "a.py", "b.log", "sub/a.py", "sub/b.log", "sub/deep/b.log", "sub/deep/c", "data/x", "README.md")

_CASES = {
    "": set(),
    "# b.log\n": set(),
    "*.log": {"b.log"},
    "/b.log": {"b.log"},
    "./b.log": {"b.log"},
    "b.log/": {"b.log"},
    "**/*.log": {"b.log", "sub/b.log", "sub/deep/b.log"},
    "*/*.log": {"sub/b.log"},
    "sub": {"sub/a.py", "sub/b.log", "sub/deep/b.log", "sub/deep/c"},
    "deep": set(),
    "sub/deep/..": {"sub/a.py", "sub/b.log", "sub/deep/b.log", "sub/deep/c"},
    "sub/**": {"sub/a.py", "sub/b.log", "sub/deep/b.log", "sub/deep/c"},
    "sub\n!sub/deep": {"sub/a.py", "sub/b.log"},
    "sub\n!sub/deep/c": {"sub/a.py", "sub/b.log", "sub/deep/b.log"},
    "*\n!a.py": set(_FILES) - {"a.py", "Dockerfile"},
    "*\n!sub/**\nsub/deep": set(_FILES) - {"sub/a.py", "sub/b.log", "Dockerfile"},
    "!a.py\n*.py": {"a.py"},
    "  README.md  ": {"README.md"},
    "?.log": {"b.log"},
    "[a-b].*": {"a.py", "b.log"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in _FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("text", _CASES)
def test_what_is_left_out(folder: Path, text: str) -> None:
    (folder / ".dockerignore").write_text(text)
    assert _sent(folder) == {*_FILES, ".dockerignore"} - _CASES[text]


def test_the_dockerfile_is_sent_whatever_the_file_says(folder: Path) -> None:
    (folder / ".dockerignore").write_text("*\n")
    (folder / "sub" / "gpu.Dockerfile").touch()
    assert _sent(folder, "sub/gpu.Dockerfile") == {".dockerignore", "sub/gpu.Dockerfile"}


def test_git_has_no_say_and_secrets_are_kept_back_also_in_folders_that_are_looked_into(folder: Path) -> None:
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".dockerignore").write_text("data\n!data/x\n")
    for name in (".env", "data/id_rsa", ".ssh/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    found = look_over(folder, ignore=DockerIgnore(folder, "Dockerfile"))
    assert {item.name for item in found.items if not item.is_folder} == {*_FILES, ".dockerignore", ".gitignore"}
    assert found.private == [".env", ".ssh/"]
    (folder / ".dockerignore").write_text("!.env\n")
    assert ".env" in _sent(folder)


def _sent(folder: Path, dockerfile: str = "Dockerfile") -> set[str]:
    items = look_over(folder, ignore=DockerIgnore(folder, dockerfile)).items
    return {item.name for item in items if not item.is_folder}
