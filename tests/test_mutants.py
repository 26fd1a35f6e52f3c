"""The lists of ``make mutate`` fit the code: what moves costs an edit here, and is not found out an hour later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutate import LISTS, ROOT, read

BUGS = read(LISTS)
RUFF = (sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise")


@pytest.mark.parametrize("floor", ["bootstrap", "cli", "cluster", "stacks", "trainers"])
def test_every_bug_can_be_applied_and_names_tests_that_are_there(floor: str) -> None:
    bugs = [bug for bug in BUGS if bug.floor == floor]
    assert bugs
    for bug in bugs:
        source = (ROOT / bug.path).read_text()
        assert bug.applied(source) != source
        assert bug.tests
        for test in bug.tests:
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text()
            assert not name or f"def {name.partition('[')[0]}(" in text, test


def test_no_bug_uses_a_name_that_is_not_there(tmp_path: Path) -> None:
    """It would be killed by any test that meets the line, whatever that test asserts."""
    for number, bug in enumerate(BUGS):
        (tmp_path / f"{number}.py").write_text(bug.applied((ROOT / bug.path).read_text()))
    done = subprocess.run(
        [*RUFF, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stdout.splitlines() if " F821 " in line]
    assert [f"{BUGS[int(Path(line.partition(':')[0]).stem)].what}: {line.partition('F821 ')[2]}" for line in said] == []
