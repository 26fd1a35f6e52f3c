"""How full a disk is said to be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpuctl.cluster import disk


def test_blocks_kept_for_root_are_neither_used_nor_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))(total=252, used=59, free=48)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert disk.used_share(tmp_path) == pytest.approx(59 / 107)


def test_it_is_what_df_says(tmp_path: Path) -> None:
    said = subprocess.run(["df", "--output=pcent", tmp_path], capture_output=True, text=True, check=True).stdout
    assert abs(100 * disk.used_share(tmp_path) - int(said.split()[-1].rstrip("%"))) <= 2


def test_what_is_not_there_or_not_a_disk_is_not_full(tmp_path: Path) -> None:
    assert disk.used_share(tmp_path / "none") == 0.0
    assert disk.used_share(Path("/proc")) == 0.0
