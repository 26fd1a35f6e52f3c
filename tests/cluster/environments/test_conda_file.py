"""What an ``environment.yml`` says, and what of it is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster.environments import conda_file, source
from gpuctl.cluster.environments.conda_file import CondaFile
from gpuctl.cluster.errors import BadInput


def test_what_it_names(tmp_path: Path) -> None:
    text = """
name: mine
channels: [pytorch, conda-forge, nodefaults]
dependencies:
  - python=3.11
  - pytorch::pytorch>=2.9
  - pip
  - pip:
      - einops>=0.8
      - orjson
prefix: /home/me/miniconda3/envs/mine
"""
    (tmp_path / "environment.yml").write_text(text)
    assert conda_file.read(tmp_path, "environment.yml") == CondaFile(
        channels=("pytorch", "conda-forge"),
        specs=("python=3.11", "pytorch::pytorch>=2.9"),
        pip=("einops>=0.8", "orjson"),
    )
    found = source.find(tmp_path)
    assert found is not None and (found.source.kind, found.packages, found.files) == ("conda", 4, ("environment.yml",))


def test_without_channels_it_is_conda_forge_and_pip_alone_is_a_package(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("dependencies: [pip]\n")
    assert conda_file.read(tmp_path, "environment.yml") == CondaFile(("conda-forge",), ("pip",), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "environment.yml has no dependencies; list some below `dependencies:`"),
        ("- numpy\n", "environment.yml has no dependencies"),
        ("name: mine\n", "environment.yml names no packages; list some, or use --environment none"),
        ("dependencies:\n", "environment.yml names no packages"),
        ("dependencies: numpy\n", "environment.yml: dependencies is not a list"),
        ("channels: x\ndependencies: [numpy]\n", "environment.yml: channels is not a list"),
        ("dependencies:\n- numpy\n - scipy: [\n", "environment.yml:3: is not YAML"),
        ("channels: [{a: b}]\ndependencies: [x]\n", "environment.yml: {'a': 'b'} is not a channel"),
        ("name: 2024-99-99\ndependencies: [x]\n", "environment.yml: is not YAML"),
        ("[" * 3000, "environment.yml: is not YAML"),
        ("dependencies: [3]\n", "environment.yml: 3 is not a package; write one a line"),
        ("dependencies: [{conda: [x]}]\n", "environment.yml: {'conda': ['x']} is not a package"),
        ("dependencies: [x]\nvariables: {A: b}\n", "environment.yml: variables has no effect on the nodes; remove it"),
        ("dependencies: [{pip: [-r other.txt]}]\n", "environment.yml: pip: -r other.txt: options have no effect there"),
        ("dependencies: [{pip: [./mine]}]\n", "environment.yml: pip: ./mine: packages from folders are not installed"),
        ("dependencies: [{pip: [a b]}]\n", "environment.yml: pip: Expected"),
    ],
)
def test_what_cannot_be_used_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "environment.yml").write_text(text)
    with pytest.raises(BadInput) as caught:
        source.find(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
