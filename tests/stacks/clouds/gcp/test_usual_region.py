"""Which region Google's own tools would use, from variables and files alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.stacks.clouds.gcp.usual_region import usual_region
from gpuctl.stacks.clouds.interface import cloud

_NAMES = ("GOOGLE_REGION", "GCLOUD_REGION", "CLOUDSDK_COMPUTE_REGION", "CLOUDSDK_ACTIVE_CONFIG_NAME")


@pytest.fixture(autouse=True)
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder, with a configuration that is active and one that is not."""
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    (tmp_path / "configurations").mkdir()
    configure(tmp_path, "default", "[core]\nproject = p\n")
    configure(tmp_path, "research", "[core]\nproject = p\n\n[compute]\nregion = europe-west4\nzone = us-east1-b\n")
    (tmp_path / "active_config").write_text("research\n")
    return tmp_path


def configure(folder: Path, name: str, text: str) -> None:
    (folder / "configurations" / f"config_{name}").write_text(text)


@pytest.mark.parametrize("place", range(3))
def test_variables_go_before_gclouds_file(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES[place:3]:
        monkeypatch.setenv(name, f"of-{name}")
    assert usual_region() == (f"of-{_NAMES[place]}", _NAMES[place])


def test_the_active_configurations_region_is_taken() -> None:
    assert usual_region() == ("europe-west4", "gcloud configuration research")
    assert cloud("gcp").usual_region() == usual_region()


def test_a_variable_names_another_configuration(gcloud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDSDK_ACTIVE_CONFIG_NAME", "default")
    assert usual_region() == ("", "")
    configure(gcloud, "default", "[compute]\nregion = asia-east1\n")
    assert usual_region() == ("asia-east1", "gcloud configuration default")


def test_without_an_active_configuration_the_default_one_counts(gcloud: Path) -> None:
    (gcloud / "active_config").unlink()
    configure(gcloud, "default", "[compute]\nregion = asia-east1\n")
    assert usual_region() == ("asia-east1", "gcloud configuration default")


def test_a_zone_tells_its_region(gcloud: Path) -> None:
    configure(gcloud, "research", "[compute]\nzone = us-east1-b\n")
    assert usual_region() == ("us-east1", "gcloud configuration research")


def test_the_home_folder_is_where_gcloud_keeps_it(gcloud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDSDK_CONFIG")
    home = gcloud / "home"
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "gcloud").symlink_to(gcloud)
    monkeypatch.setenv("HOME", str(home))
    assert usual_region() == ("europe-west4", "gcloud configuration research")


@pytest.mark.parametrize("broken", [b"no section\n", b"[compute\nregion=x", b"\xff\xfe\x00", b"[compute]\nregion\n"])
def test_a_broken_file_says_nothing(gcloud: Path, broken: bytes) -> None:
    (gcloud / "configurations" / "config_research").write_bytes(broken)
    assert usual_region() == ("", "")


@pytest.mark.parametrize("name", ["NONE", "../research", "missing"])
def test_a_name_of_no_configuration_says_nothing(gcloud: Path, name: str) -> None:
    (gcloud / "active_config").write_text(name)
    assert usual_region() == ("", "")


def test_it_brings_no_package_of_googles() -> None:
    code = (
        "import sys; from gpuctl.stacks.clouds.interface import cloud; print(cloud('gcp').usual_region()[0]); "
        "print([name for name in sys.modules if name.split('.')[0] in ('google', 'pulumi', 'requests')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout == "europe-west4\n[]\n", done.stderr
