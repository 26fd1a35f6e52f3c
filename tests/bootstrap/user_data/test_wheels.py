"""What pip will do on the clouds' images, asked of the index here without installing anything: a wheel of each pin for
their Python and their C library, and a torch whose CUDA is one that their drivers know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gpuctl.cluster import distribution
from gpuctl.stacks.clouds.aws.resources import group as aws
from gpuctl.stacks.clouds.azure.resources import group as azure
from gpuctl.stacks.clouds.gcp.resources import group as gcp
from tests.paths import ROOT

PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64")
"""Of Ubuntu 24.04, which the images of all three clouds are made of."""
_NODE = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "extra": ""}
_BUILT_FOR_CUDA = re.compile(r"cuda-|nvidia-(?!ml-py$)|triton$")
"""What torch has pinned itself, and only where it is built for CUDA; not every index has all of it."""
_AWAY = ("ConnectionError", "TimeoutError", "NameResolutionError", "ProxyError", "SSLError", "Temporary failure")

OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""By CUDA, whatever its minor version (docs.nvidia.com, "CUDA Compatibility")."""
IMAGES = {
    "aws": ("595.91", "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest", aws._IMAGE),
    "gcp": ("580", "ubuntu-accelerator-2404-amd64-with-nvidia-580", gcp.FAMILY),
    "azure": ("580.173.02", "microsoft-dsvm:ubuntu-hpc:2404", azure._IMAGE),
}
"""By cloud: the driver of its image in October 2026 (AWS's release notes; Google's name of it; versions.json of
azhpc-images), what that image was called, and what gpuctl takes."""

pytestmark = pytest.mark.slow  # an index is asked about some forty packages


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What pip would fetch for a node, by name: its metadata."""
    wanted = _closure()
    options = ["--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report=-"]
    options += [f"--python-version={PYTHON}", *(f"--platform={name}" for name in PLATFORMS), "--target=/nowhere"]
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "-c", "constraints.txt", *sorted(wanted)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.endswith("_CONSTRAINT")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    if ran.returncode and any(word in ran.stderr for word in _AWAY):
        pytest.skip(f"no package index answers: {ran.stderr.strip().splitlines()[-1]}")
    assert ran.returncode == 0, "\n".join(line for line in ran.stderr.splitlines() if not line.startswith("WARNING"))
    held = [one["metadata"] for one in json.loads(ran.stdout)["install"]]
    return {canonicalize_name(one["name"]): one for one in held}


def _closure() -> set[str]:
    """Names of all that a node's environment is made of, but for what only CUDA brings: as they depend on each other
    here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left = [Requirement(need) for need in (*project["dependencies"], *project["optional-dependencies"]["train"])]
    names: set[str] = set()
    while left:
        name = canonicalize_name(left.pop().name)
        if name not in names:
            names.add(name)
            left += _needs(requires(name) or [])
    return names - {distribution.NAME}


def _needs(lines: list[str]) -> list[Requirement]:
    """Those that a node's Python has a use for."""
    needs = [Requirement(line) for line in lines]
    where: dict[str, str] = {**{name: str(value) for name, value in default_environment().items()}, **_NODE}
    here = [need for need in needs if need.marker is None or need.marker.evaluate(where)]
    return [need for need in here if not _BUILT_FOR_CUDA.match(canonicalize_name(need.name))]


def test_each_pin_has_a_wheel_for_the_python_and_the_c_library_of_the_images(found: dict[str, Any]) -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned: dict[str, str] = {canonicalize_name(name): version for name, version in pins.items()}
    assert {name: Version(one["version"]).public for name, one in found.items()} == {
        name: pinned[name] for name in found
    }
    assert {"torch", "numpy", "obstore", "msgspec"} <= found.keys()


def test_the_pins_agree_with_each_other_on_the_images_python(found: dict[str, Any]) -> None:
    """Which is another one than that they were made with, and may want more."""
    for name, one in found.items():
        for need in _needs(one.get("requires_dist", [])):
            other = found.get(canonicalize_name(need.name))
            assert other, f"{name} needs {need}, and nothing brings it"
            assert need.specifier.contains(other["version"], prereleases=True), f"{name} needs {need}"


@pytest.mark.parametrize("cloud", IMAGES)
def test_the_images_driver_knows_the_cuda_that_torch_is_built_for(cloud: str, found: dict[str, Any]) -> None:
    driver, looked_up, taken = IMAGES[cloud]
    assert looked_up in taken, "another image: look up its driver"
    needs = [Requirement(line) for line in found["torch"]["requires_dist"]]
    toolkits = [need for need in needs if need.name == "cuda-toolkit"]
    if not toolkits:
        pytest.skip("this index has torch for CPUs only")
    (cuda,) = (Version(pin.version) for pin in toolkits[0].specifier)
    oldest = OLDEST_DRIVER[cuda.major]
    assert Version(driver) >= Version(oldest if "." in driver else oldest.partition(".")[0]), f"CUDA {cuda}"
