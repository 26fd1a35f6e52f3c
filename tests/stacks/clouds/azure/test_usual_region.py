"""The region that ``az`` and Pulumi would use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.stacks.clouds.azure.usual_region import usual_region

NAMES = ("AZURE_DEFAULTS_LOCATION", "AZURE_LOCATION", "ARM_LOCATION", "AZURE_CONFIG_DIR")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def configured(folder: Path, text: str | bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config").write_bytes(text if isinstance(text, bytes) else text.encode())


def test_nothing_says_it() -> None:
    assert usual_region() == ("", "")


def test_azs_file_says_it(home: Path) -> None:
    configured(home / ".azure", "[cloud]\nname = AzureCloud\n\n[defaults]\nlocation = West Europe\ngroup = 100%\n")
    assert usual_region() == ("westeurope", "~/.azure/config")


def test_azs_file_may_be_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(home / ".azure", "[defaults]\nlocation = westeurope\n")
    configured(home / "other", "[defaults]\nlocation = uksouth\n")
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(home / "other"))
    assert usual_region() == ("uksouth", "~/other/config")


@pytest.mark.parametrize("name", ["AZURE_DEFAULTS_LOCATION", "ARM_LOCATION", "AZURE_LOCATION"])
def test_a_variable_goes_before_the_file(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    configured(home / ".azure", "[defaults]\nlocation = westeurope\n")
    monkeypatch.setenv(name, "northeurope")
    assert usual_region() == ("northeurope", name)


@pytest.mark.parametrize("text", ["location = x", "[defaults]\n[defaults]\n", b"\xff\xfe\x00", "[defaults]\n", ""])
def test_a_broken_file_says_nothing(home: Path, text: str | bytes) -> None:
    configured(home / ".azure", text)
    assert usual_region() == ("", "")


def test_no_sdk_is_imported_for_it() -> None:
    code = "import sys; from gpuctl.stacks.clouds.azure.usual_region import usual_region; usual_region()"
    code += "; print([m for m in sys.modules if m.partition('.')[0] in ('azure', 'pulumi')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
