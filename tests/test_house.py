"""Guards of the house itself: its layout, its packaging, its pins, its papers."""

from __future__ import annotations

import ast
import doctest
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gpuctl
from gpuctl.cluster import distribution
from tests.paths import ROOT

FLOORS = ("cli", "stacks", "bootstrap", "trainers", "cluster")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

APART = ("docs", "jax", "tensorflow")
"""Extras that are not in `.venv`."""

# Brought only by torch built for CUDA, which pins them itself.
CUDA_ONLY = re.compile(r"nvidia-(?!ml-py$)|cuda-|triton")


def _rooms() -> list[Path]:
    return sorted({path.parent for path in _modules()})


def _modules() -> list[Path]:
    return [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_stands_at_the_top_and_is_linked_into_the_package(floor: str) -> None:
    link = ROOT / "src" / "gpuctl" / floor
    assert link.readlink() == Path("..", "..", floor)
    assert (ROOT / floor / "__init__.py").is_file()


def test_the_package_holds_the_floors_and_nothing_else() -> None:
    found = {path.name for path in (ROOT / "src" / "gpuctl").iterdir()} - {"__pycache__"}
    assert found == {*FLOORS, "__init__.py", "jax.py", "py.typed", "constraints.txt"}


def test_every_test_folder_mirrors_a_floor() -> None:
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= {*FLOORS, "bench", "docs", "e2e", "examples", "fakes", "machines"}


@pytest.mark.parametrize("floor", FLOORS)
def test_tests_stand_where_their_modules_do(floor: str) -> None:
    rooms = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests" / floor).rglob("test_*.py")}
    assert rooms and {room for room in rooms if not (ROOT / room / "__init__.py").is_file()} == set()


def test_a_room_is_small() -> None:
    """Whoever opens it sees all of it at once. The boot program is one thing, which travels as a whole."""
    sizes = {room: len([*room.glob("*.py")]) for room in _rooms()}
    assert {room: size for room, size in sizes.items() if size > 11 and room != ROOT / "bootstrap" / "boot"} == {}


def test_a_module_fits_in_the_head() -> None:
    lengths = {path: len(path.read_text().splitlines()) for room in _rooms() for path in room.glob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 300} == {}


@pytest.mark.parametrize("room", [room for room in _rooms() if room.parent != ROOT / "stacks" / "clouds"], ids=str)
def test_a_room_begins_with_its_map(room: Path) -> None:
    """``__init__.py`` names what is in the room, and holds nothing that an import of a module in it would pay for."""
    tree = ast.parse((room / "__init__.py").read_text())
    said = ast.get_docstring(tree) or ""
    there = {path.stem for path in room.glob("*.py")} | {path.parent.name for path in room.glob("*/__init__.py")}
    assert {name for name in there if not name.startswith("__") and f"``{name}``" not in said} == set()
    if room != ROOT / "bootstrap" / "boot":
        assert len(tree.body) == 1


def test_a_module_is_named_for_what_it_holds() -> None:
    says_nothing = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc", "lib"}
    assert [p for p in _modules() if p.stem in says_nothing] == []


def test_the_version_is_the_same_everywhere_and_in_the_changelog() -> None:
    version = PROJECT["project"]["version"]
    assert gpuctl.__version__ == version
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_nobody_is_told_to_install_the_project_of_another() -> None:
    """``gpuctl`` is taken on PyPI."""
    assert PROJECT["project"]["name"] == distribution.NAME != "gpuctl"
    assert doctest.testmod(distribution) == (0, 1)
    told = re.compile(r"pip install (-\S+ )*['\"]?gpuctl(?!-spot)\b|['\"]gpuctl\[")
    texts = [*_modules(), *PAPERS, *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    wrong = [path for path in texts if told.search(path.read_text())]
    assert [str(path) for path in wrong if path != Path(__file__)] == []


@pytest.mark.slow
def test_every_public_name_can_be_imported() -> None:
    names = ", ".join(name for name in gpuctl.__all__ if not name.startswith("__"))
    subprocess.run([sys.executable, "-c", f"from gpuctl import {names}"], check=True)


@pytest.mark.slow
def test_the_import_contracts_hold(tmp_path: Path) -> None:
    assert _broken_contracts(_copy_of_the_house(tmp_path)) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("cluster/planted.py", "import gpuctl.trainers", "imports go down only"),
        ("bootstrap/planted.py", "def later(): import gpuctl.stacks.providers.interface", "imports go down only"),
        ("attic/__init__.py", "", "gpuctl.attic"),
        ("cluster/planted.py", "def later(): import torch", "knows no torch"),
        ("bootstrap/planted.py", "from pulumi import automation", "needs no Pulumi"),
    ],
)
def test_a_forbidden_import_breaks_a_contract(tmp_path: Path, file: str, line: str, contract: str) -> None:
    house = _copy_of_the_house(tmp_path)
    planted = house / "src" / "gpuctl" / file
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(f"{line}\n")
    assert contract in _broken_contracts(house)


@pytest.mark.parametrize("through_an_sdist", [False, True], ids=["from the tree", "from the sdist"])
def test_a_wheel_holds_every_module(tmp_path: Path, through_an_sdist: bool) -> None:
    source = ROOT
    if through_an_sdist:
        _python("-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path))
        (source,) = tmp_path.glob("*.tar.gz")
    wheels = tmp_path / "wheels"
    _python(
        *("-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(wheels), str(source)),
    )
    (wheel,) = wheels.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("gpuctl_spot-")}
    modules = {f"gpuctl/{path.relative_to(ROOT)}" for path in _modules()}
    assert {name for name in packed if name.endswith(".py")} == modules | {"gpuctl/__init__.py", "gpuctl/jax.py"}
    assert "gpuctl/py.typed" in packed


def test_the_constraints_are_exact_and_portable() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9a-z.]+", line)] == []
    assert len(_pins()) == len(lines), "a package is pinned twice"
    assert [name for name in _pins() if CUDA_ONLY.match(name)] == []
    assert _pins()["torch"] == "2.13.0"


def test_the_constraints_pin_every_package_that_the_extras_bring() -> None:
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in _needed_packages()}
    pins = _pins()
    assert {name: version for name, version in installed.items() if pins.get(name) != version} == {}, (
        "not as pinned in constraints.txt: run `make setup`, or `make constraints` after a change of pyproject.toml"
    )


@pytest.mark.parametrize("extra", APART)
def test_the_constraints_pin_what_is_installed_apart(extra: str) -> None:
    """Whether it is installed or not: the tests do without."""
    wanted = [Requirement(text) for text in PROJECT["project"]["optional-dependencies"][extra]]
    assert [str(one) for one in wanted if _pins().get(canonicalize_name(one.name), "") not in one.specifier] == []


def test_every_requirement_is_bounded() -> None:
    project = PROJECT["project"]
    lists = [PROJECT["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for texts in lists for text in texts]
    unbounded = [
        r.name for r in requirements if r.name != distribution.NAME and {s.operator for s in r.specifier} != {">=", "<"}
    ]
    assert unbounded == []


def test_continuous_integration_does_what_ci_run_does() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    assert steps[-1] == ".ci/run"
    assert "make test-all" in [step.get("run") for step in workflow["jobs"]["all"]["steps"]]
    assert {"push", "pull_request", "schedule", "workflow_dispatch", "release"} <= workflow[True].keys()  # YAML's "on"
    assert workflow["jobs"]["docs"]["steps"][-1]["run"] == "make docs"
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    named = [word for command in commands for word in command.split() if word.startswith(("tests/", ".ci/"))]
    assert [path for path in named if not (ROOT / path).exists()] == []
    pythons = [
        f"Programming Language :: Python :: {one}" for one in workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    ]
    assert pythons == [line for line in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]
    for script in ("run", "install-system"):
        assert os.access(ROOT / ".ci" / script, os.X_OK)


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


PAPERS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: str(paper.relative_to(ROOT)))
def test_what_a_paper_names_exists(paper: Path) -> None:
    text = paper.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [link for link in links if not (paper.parent / link).exists()] == []
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`", text)) <= targets


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


def _copy_of_the_house(folder: Path) -> Path:
    house = folder / "house"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*FLOORS, "src"):
        shutil.copytree(ROOT / name, house / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", house)
    return house


def _broken_contracts(house: Path) -> str:
    """What the contracts complain about in the copy at ``house``; empty if they hold."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(house / "src")}
    done = subprocess.run(command, cwd=house, env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def _needed_packages() -> set[str]:
    """All that gpuctl's requirements and extras lead to on this machine, the build backend with them. Not what only
    `make docs` and `make frameworks` install."""
    extras = PROJECT["project"]["optional-dependencies"].keys() - {*APART}
    waiting = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    waiting.append(Requirement(f"{distribution.NAME}[{','.join(extras)}]"))
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        place = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if place in seen or CUDA_ONLY.match(place[0]):
            continue
        seen.add(place)
        for text in importlib.metadata.requires(requirement.name) or []:
            child = Requirement(text)
            chosen = [{"extra": extra} for extra in requirement.extras] or [{"extra": ""}]
            if child.marker is None or any(child.marker.evaluate(environment) for environment in chosen):
                waiting.append(child)
    return {name for name, _ in seen} - {distribution.NAME}
