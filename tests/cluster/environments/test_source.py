"""Which file a job's packages come from, and what is wrong with it before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster.environments.source import find
from gpuctl.cluster.errors import BadInput

LOCK = """\
version = 1
[[package]]
name = "einops"
version = "0.8.2"
source = { registry = "https://pypi.org/simple" }
[[package]]
name = "mine"
version = "0.1"
source = { virtual = "." }
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ([], None),
        (["environment.yml"], "environment.yml"),
        (["environment.yml", "requirements.txt"], "requirements.txt"),
        (["requirements.txt", "pylock.toml"], "pylock.toml"),
        (["pylock.toml", "uv.lock", "pyproject.toml"], "uv.lock"),
        (["requirements.txt", "uv.lock"], "requirements.txt"),
        (["pyproject.toml"], None),
    ],
)
def test_the_first_of_the_usual_files_is_used(tmp_path: Path, there: list[str], found: str | None) -> None:
    content = {
        "uv.lock": LOCK,
        "pyproject.toml": "",
        "pylock.toml": 'lock-version = "1.0"\n[[packages]]\nname = "einops"\n',
        "requirements.txt": "einops\n",
        "environment.yml": "dependencies: [einops]\n",
    }
    write(tmp_path, {name: content[name] for name in there})
    chosen = find(tmp_path)
    assert (chosen.source.file if chosen else None) == found
    assert chosen is None or chosen.packages == 1
    assert find(tmp_path, "none") is None


def test_a_file_that_is_named_wins(tmp_path: Path) -> None:
    write(tmp_path, {"requirements.txt": "einops", "more/gpu.txt": "orjson\nhumanize\n"})
    chosen = find(tmp_path, "more/gpu.txt")
    assert chosen is not None
    assert (chosen.source.file, chosen.source.kind, chosen.packages) == ("more/gpu.txt", "requirements", 2)


REQUIREMENTS = """\
# a comment
einops==0.8.2  # another

--extra-index-url https://example.com/simple
-r more/base.txt
-c limits.txt
orjson[all] >= 3 ; python_version < "4"
humanize \\
    --hash=sha256:abc
git+https://github.com/someone/thing@v1
lib @ https://example.com/lib-1.0-py3-none-any.whl
thing==${VERSION}
"""


def test_a_requirements_file_is_read_as_pip_reads_it_with_those_that_it_includes(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"requirements.txt": REQUIREMENTS, "more/base.txt": "-r also.txt\n", "more/also.txt": "six", "limits.txt": ""},
    )
    chosen = find(tmp_path)
    assert chosen is not None
    assert chosen.files == ("requirements.txt", "more/base.txt", "limits.txt", "more/also.txt")
    assert chosen.packages == 7


@pytest.mark.parametrize("changed", ["requirements.txt", "more.txt", "limits.txt", "uv.toml"])
def test_a_change_in_any_file_is_another_environment(tmp_path: Path, changed: str) -> None:
    write(tmp_path, {"requirements.txt": "six\n-r more.txt\n-c limits.txt\n", "more.txt": "a", "limits.txt": "a<2"})
    write(tmp_path, {"uv.toml": ""})
    before, again = find(tmp_path), find(tmp_path)
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\nb\n")
    after = find(tmp_path)
    assert before and after and again and before.source.digest == again.source.digest != after.source.digest


@pytest.mark.parametrize(
    ("files", "choice", "message"),
    [
        ({"requirements.txt": ""}, None, "requirements.txt names no packages; list some, or use --environment none"),
        ({"requirements.txt": "# none\n\n-i https://x\n"}, None, "requirements.txt names no packages"),
        ({"requirements.txt": "six\n\n==3 x\n"}, None, "requirements.txt:3: Expected package name"),
        ({"requirements.txt": "six\neinops=0.8\n"}, None, "requirements.txt:2: Expected"),
        ({"requirements.txt": "six \\\n  >>2\nx\n"}, None, "requirements.txt:1: "),
        ({"requirements.txt": "-r more.txt\n", "more.txt": "a\n!\n"}, None, "more.txt:2: "),
        ({"requirements.txt": "a\n-r more.txt\n"}, None, "requirements.txt:2: more.txt does not exist"),
        ({"requirements.txt": "-r ../more.txt\n"}, None, "../more.txt is outside the working folder"),
        ({"requirements.txt": "a\n-e .\n"}, None, "requirements.txt:2: -e .: packages from folders are not installed"),
        ({"requirements.txt": "./lib\n"}, None, "requirements.txt:1: ./lib: packages from folders"),
        ({"requirements.txt": "lib @ file:///lib\n"}, None, "requirements.txt:1: lib @ file:///lib: packages from"),
        ({}, "gpu.txt", "environment file gpu.txt does not exist; name a requirements.txt, or leave it out"),
        ({"requirements.txt": "a"}, "gpu.txt", "does not exist; use one of: requirements.txt, none"),
        ({"train.py": ""}, "train.py", "train.py is not an environment file; use a uv.lock"),
        ({"uv.lock": LOCK}, "uv.lock", "uv.lock has no pyproject.toml beside it"),
        ({"uv.lock": "x", "pyproject.toml": ""}, None, "uv.lock is not TOML"),
        ({"pylock.toml": "[[packages]\n"}, None, "pylock.toml is not TOML"),
        ({"pylock.toml": 'lock-version = "1.0"\n'}, None, "pylock.toml names no packages"),
        ({"environment.yml": "dependencies:\n  - a\n b\n"}, None, "environment.yml:3: is not YAML"),
        ({"environment.yml": "dependencies: a"}, None, "environment.yml: dependencies is not a list"),
        ({"environment.yml": "name: x"}, None, "environment.yml names no packages"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_line(
    tmp_path: Path, files: dict[str, str], choice: str | None, message: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(BadInput) as raised:
        find(tmp_path, choice)
    assert message in str(raised.value)


def test_a_lock_with_packages_from_other_folders_is_refused(tmp_path: Path) -> None:
    more = '[[package]]\nname = "lib"\nversion = "1"\nsource = { editable = "libs/lib" }\n'
    write(tmp_path, {"uv.lock": LOCK + more, "pyproject.toml": ""})
    with pytest.raises(BadInput, match=r"uv\.lock: lib comes from libs/lib: packages from folders are not installed"):
        find(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(BadInput, match=r"requirements\.txt is not UTF-8"):
        find(tmp_path)


def test_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "requirements.txt").write_text("six")
    with pytest.raises(BadInput, match="outside the working folder"):
        find(work, "../requirements.txt")
