"""What is tried again, what is told of it, and what fails a run of the tests all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.waiting import PATIENCE_S
from tools import test_run

AT_FIRST = """
    from pathlib import Path

    def test_second_time():
        before = Path(__file__).with_name("before")
        assert before.exists() or before.write_text("") != 0, "this is the first time"
"""


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    lines: list[str]
    flaky: list[dict[str, Any]]


def run(folder: Path, text: str, *args: str) -> Ran:
    """The tests in ``text``, in a project of their own."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (folder / "test_some.py").write_text("\n".join(line[4:] for line in text.splitlines()))
    plugins = ["-p", "xdist.plugin"] if "-n" in args else []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take half of the time
    command = [sys.executable, "-m", "tools.test_run", *plugins, *args]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S
    )
    kept = folder / "build/flaky.json"
    return Ran(done.returncode, done.stdout.splitlines(), json.loads(kept.read_text()) if kept.exists() else [])


@pytest.mark.parametrize("args", [(), ("-n", "1", "--dist", "loadgroup")], ids=["in one process", "in workers"])
def test_what_fails_always_fails_the_run(tmp_path: Path, args: tuple[str, ...]) -> None:
    ran = run(
        tmp_path,
        """
    def test_well():
        pass

    def test_ill():
        assert 1 == 2
    """,
        *args,
    )
    assert ran.code == 1
    assert ran.lines[-1] == "1 passed, 1 failed, 0 skipped"
    assert ran.flaky == []


@pytest.mark.parametrize("args", [(), ("-n", "1", "--dist", "loadgroup")], ids=["in one process", "in workers"])
def test_what_fails_the_first_time_only_is_told(tmp_path: Path, args: tuple[str, ...]) -> None:
    group = "import pytest\n    pytestmark = pytest.mark.xdist_group('one')\n"
    ran = run(tmp_path, f"\n    {group}{AT_FIRST}", *args)
    assert ran.code == 0, ran.lines
    assert ran.lines[-2] == "flaky test_some.py::test_second_time: AssertionError: this is the first time"
    assert ran.lines[-1] == "1 passed, 0 failed, 0 skipped"
    (kept,) = ran.flaky
    assert kept["test"] == "test_some.py::test_second_time"
    assert "this is the first time" in kept["said"] and "before.exists()" in kept["said"]


def test_a_worker_that_crashes_is_a_failure_that_is_tried_again(tmp_path: Path) -> None:
    ran = run(
        tmp_path,
        """
    import os
    from pathlib import Path

    def test_second_time():
        before = Path(__file__).with_name("before")
        if not before.exists():
            before.touch()
            os._exit(1)
    """,
        "-n",
        "1",
    )
    assert ran.code == 0, ran.lines
    assert "crashed while running" in ran.lines[-2]
    assert ran.lines[-1] == "1 passed, 0 failed, 0 skipped"


def test_an_error_when_a_fixture_ends_is_a_failure(tmp_path: Path) -> None:
    ran = run(
        tmp_path,
        """
    import pytest

    @pytest.fixture
    def used():
        yield
        raise RuntimeError("not taken down")

    def test_well(used):
        pass
    """,
    )
    assert (ran.code, ran.lines[-1]) == (1, "0 passed, 1 failed, 0 skipped")


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    ran = run(
        tmp_path,
        """
    import pytest

    @pytest.mark.parametrize("number", range(11))
    def test_ill(number):
        assert not number + 1
    """,
    )
    assert (ran.code, ran.lines[-1]) == (1, "0 passed, 11 failed, 0 skipped")
    assert not [line for line in ran.lines if "once more" in line]


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("\n    import nothing_of_this_name\n\n    def test_well():\n        pass", ()),
        ("\n    import nothing_of_this_name\n\n    def test_well():\n        pass", ("-n", "1")),
        ("\n    def no_test():\n        pass", ()),
        ("\n    def test_well():\n        raise KeyboardInterrupt", ()),
        ("\n    def test_well():\n        pass", ("--no-such-option",)),
    ],
    ids=["collection", "collection in workers", "no tests", "interrupted", "usage"],
)
def test_a_run_that_is_none_fails(tmp_path: Path, text: str, args: tuple[str, ...]) -> None:
    ran = run(tmp_path, text, *args)
    assert ran.code != 0
    assert ran.lines[-1] == "0 passed, 0 failed, 0 skipped, 1 error"


def test_a_file_that_cannot_be_read_fails_a_run_in_which_all_else_is_well_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("raise RuntimeError")
    ran = run(tmp_path, AT_FIRST, "--continue-on-collection-errors")
    assert (ran.code, ran.lines[-1]) == (1, "0 passed, 1 failed, 0 skipped, 1 error")


def test_the_last_run_tells_what_is_slow_and_has_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "build").mkdir()
    took_s = {"a.py::test_a": [0.1, 9.0], "a.py::test_b": [2.5, 2.5], "a.py::test_c": [7.0, 7.0]}
    (tmp_path / "build/test-times.json").write_text(json.dumps({"took_s": took_s, "marked": ["a.py::test_c"]}))
    monkeypatch.chdir(tmp_path)
    assert test_run.main(["--times"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 tests took 18 s; the longest, with fixtures:",
        "    9.0 s  a.py::test_a",
        "    7.0 s  a.py::test_c",
        "    2.5 s  a.py::test_b",
        "1 without a mark took 2 s or more, without fixtures:",
        "    2.5 s  a.py::test_b",
    ]
