"""What a failed test tells of the processes that it had started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import failures
from tests.paths import ROOT
from tests.waiting import PATIENCE_S


def test_what_a_program_said_is_told_with_its_error_and_also_where_that_was_the_cause(tmp_path: Path) -> None:
    script = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(1)"
    try:
        try:
            subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise RuntimeError("it failed") from error
    except RuntimeError as error:
        told = dict(failures.sections(error, tmp_path))
    assert [(title.split()[0], text) for title, text in told.items()] == [("stdout", "one"), ("stderr", "two")]


def test_the_ends_of_logs_are_told_the_newest_first(tmp_path: Path) -> None:
    for number in range(14):
        path = tmp_path / f"node-{number}" / "agent.log"
        path.parent.mkdir()
        path.write_text("".join(f"{number}: line {line}\n" for line in range(100)))
        os.utime(path, (number, number))
    (tmp_path / "empty.log").touch()
    (tmp_path / "weights.bin").write_bytes(b"\0" * 100)
    told = list(failures.sections(None, tmp_path))
    assert [title for title, _ in told] == [f"end of node-{number}/agent.log" for number in range(13, 1, -1)]
    assert told[0][1].splitlines() == [f"13: line {line}" for line in range(80, 100)]


def test_a_path_too_long_to_be_named_hides_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.log").write_text("last words")
    monkeypatch.chdir(tmp_path)
    for _ in range(17):
        Path(250 * "d").mkdir()
        os.chdir(250 * "d")
    assert list(failures.sections(None, tmp_path)) == [("end of agent.log", "last words")]


@pytest.mark.slow
def test_the_report_has_it_and_so_has_the_record_of_flaky_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_makereport\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (tmp_path / "test_some.py").write_text("""
from pathlib import Path

def test_second_time(tmp_path):
    (tmp_path / "agent.log").write_text("the agent's last words")
    before = Path(__file__).with_name("before")
    assert before.exists() or before.write_text("") != 0
""")
    done = subprocess.run(
        [sys.executable, "-m", "tools.test_run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the agent's last words" in done.stdout
    (flaky,) = json.loads((tmp_path / "build/flaky.json").read_text())
    assert "end of agent.log\nthe agent's last words" in flaky["said"]
