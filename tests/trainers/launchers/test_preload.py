"""What a script will import, read from its source."""

from __future__ import annotations

import sys
from pathlib import Path

from gpuctl.trainers.launchers.preload import imports_of, preload


def _write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "script.py"


def test_top_level_imports_are_named_in_order_with_what_is_taken_from_them(tmp_path: Path) -> None:
    script = _write(tmp_path, script="import json\nfrom xml import dom\nimport os.path as p\nfrom math import *\n")
    assert imports_of(script, tmp_path) == ["json", "xml.dom", "os.path", "math"]


def test_imports_in_functions_wait_until_they_are_called_and_those_in_branches_do_not(tmp_path: Path) -> None:
    text = (
        "def f():\n    import wave\nif True:\n    import json\ntry:\n    import csv\nexcept OSError:\n    import cmd\n"
    )
    assert imports_of(_write(tmp_path, script=text), tmp_path) == ["json", "csv"]


def test_a_neighbouring_module_is_read_and_not_imported(tmp_path: Path) -> None:
    script = _write(tmp_path, script="import model\n", model="import csv\nraise SystemExit('nobody may run me')\n")
    assert imports_of(script, tmp_path) == ["csv"]


def test_modules_that_a_fork_would_break_are_left_out(tmp_path: Path) -> None:
    assert imports_of(
        _write(tmp_path, script="import tensorflow as tf\nimport jax.numpy\nimport json\n"), tmp_path
    ) == ["json"]


def test_source_that_cannot_be_read_has_no_imports(tmp_path: Path) -> None:
    assert imports_of(_write(tmp_path, script="def broken(:\n"), tmp_path) == []
    assert imports_of(tmp_path / "missing.py", tmp_path) == []


def test_preload_imports_modules_and_lazy_attributes_and_names_what_failed(tmp_path: Path) -> None:
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(1)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        failed = preload(["colorsys", "gpuctl.log_metrics", "no_such_module_here", "exits_at_import"])
    finally:
        sys.path.remove(str(tmp_path))
    assert failed == ["no_such_module_here", "exits_at_import"]
    assert "colorsys" in sys.modules and "gpuctl.trainers.metrics.stream" in sys.modules
