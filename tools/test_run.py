"""Runs the tests, and those that failed once more, alone, when the rest is done (``python -m tools.test_run``).

What passes then does not fail the run, but the last lines list it as flaky with what it said the first time, and
``build/flaky.json`` keeps it. Any arguments are pytest's. ``--times`` instead of them lists what took longest in the
last run, and each test without a mark that is slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from tests.environment import cache
from tests.leftovers import RUN, alone

FLAKY = Path("build/flaky.json")
TIMES = Path("build/test-times.json")
_MOST_TRIED_AGAIN = 10
"""More failures than these are no bad luck."""
_SLOW_S = 2.0
_LISTED = 30
_MARKS = ("slow", "timing", "machines", "exhaustive")
_RECORD = "--record"
"""First of the arguments of a second run: the file for its record follows."""


@dataclass(slots=True, eq=False)  # pytest has its plugins in sets
class Record:
    """What a run came to. As a plugin of pytest it fills itself; xdist tells it what the workers did."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """What each test that failed said, by its id."""
    skipped: list[str] = field(default_factory=list)
    errors: int = 0
    """Files that could not be collected."""
    took_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each test: its own, and those of its fixtures too, which may be the first to need a server."""
    marked: list[str] = field(default_factory=list)
    """Tests with a mark that keeps them from `make test`."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.errors += report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = _without_group(report.nodeid)
        own_s, all_s = self.took_s.get(test, [0.0, 0.0])
        self.took_s[test] = [own_s + report.duration * (report.when == "call"), all_s + report.duration]
        if report.when == "setup" and any(mark in report.keywords for mark in _MARKS):
            self.marked.append(test)
        if report.failed:  # a worker that crashed has a report of this kind too
            said = [report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)]
            self.failed.setdefault(test, "\n".join(said))
        elif report.skipped:
            self.skipped.append(test)
        elif report.when == "call":
            self.passed.append(test)

    def well(self) -> set[str]:
        """Tests that passed, also when what they used was taken down."""
        return set(self.passed) - set(self.failed)


def main(args: Sequence[str]) -> int:
    if args == ["--times"]:
        return _list_times()
    if args[:1] == [_RECORD]:
        record = Record()
        code = int(pytest.main([*args[2:]], plugins=[record]))
        Path(args[1]).write_text(json.dumps(asdict(record)))
        return code
    if RUN in os.environ:  # a part of a run, which may test this very module
        return _run(args)
    with alone(cache() / "lock"):
        return _run(args)


def _run(args: Sequence[str]) -> int:
    env = dict(os.environ)  # as it was: the tests' conftest.py changes it
    first = Record()
    code = int(pytest.main([*args], plugins=[first]))
    _write(TIMES, {"took_s": first.took_s, "marked": first.marked})
    flaky: dict[str, str] = {}
    if code == pytest.ExitCode.TESTS_FAILED and not first.errors and 0 < len(first.failed) <= _MOST_TRIED_AGAIN:
        print(f"\ntried once more, alone: {len(first.failed)} that failed", flush=True)
        passed = _try_again([*first.failed], env)
        flaky = {test: said for test, said in first.failed.items() if test in passed}
        if len(flaky) == len(first.failed):
            code = 0
    _write(FLAKY, [{"test": test, "said": said} for test, said in flaky.items()])
    _conclude(first, flaky, code)
    return code


def _try_again(tests: Sequence[str], env: Mapping[str, str]) -> set[str]:
    """Those that pass now, one after the other. Each file in a process of its own: given as the paths of several
    folders, pytest may not find the fixtures of a ``conftest.py`` above them."""
    passed: set[str] = set()
    for _, of_file in groupby(sorted(tests), key=lambda test: test.partition("::")[0]):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "record.json"
            command = [sys.executable, "-m", "tools.test_run", _RECORD, str(path), "-m", "", *of_file]
            subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False)
            if path.exists():
                passed |= Record(**json.loads(path.read_text())).well()
    return passed


def _conclude(first: Record, flaky: Mapping[str, str], code: int) -> None:
    """The last lines. The very last is like pytest's, since that is what tests are counted by."""
    print()
    for test, said in flaky.items():
        print(f"flaky {test}: {_in_a_line(said)}")
    failed = first.failed.keys() - flaky.keys()
    counts = [
        f"{len(first.well()) + len(flaky)} passed",
        f"{len(failed)} failed",
        f"{len(set(first.skipped) - set(first.failed))} skipped",
    ]
    if code not in (0, pytest.ExitCode.TESTS_FAILED) or first.errors:
        counts.append(f"{max(first.errors, 1)} error{'s' if first.errors > 1 else ''}")
    print(", ".join(counts), flush=True)


def _in_a_line(said: str) -> str:
    """Of a traceback, what was raised: pytest puts an E before it."""
    lines = [line for line in said.splitlines() if line.strip()]
    raised = [line[1:] for line in lines if line.startswith("E ")]
    return next(iter(raised or lines[-1:]), "").strip()


def _list_times() -> int:
    if not TIMES.exists():
        print(f"no {TIMES}: run the tests first (make test)", file=sys.stderr)
        return 1
    known = json.loads(TIMES.read_text())
    took_s: dict[str, list[float]] = known["took_s"]
    print(f"{len(took_s)} tests took {sum(all_s for _, all_s in took_s.values()):.0f} s; the longest, with fixtures:")
    for test in sorted(took_s, key=lambda test: -took_s[test][1])[:_LISTED]:
        print(f"{took_s[test][1]:7.1f} s  {test}")
    marked = set(known["marked"])
    slow = [test for test, (own_s, _) in took_s.items() if own_s >= _SLOW_S and test not in marked]
    print(f"{len(slow)} without a mark took {_SLOW_S:g} s or more, without fixtures:")
    for test in sorted(slow, key=lambda test: -took_s[test][0]):
        print(f"{took_s[test][0]:7.1f} s  {test}")
    return 0


def _without_group(test: str) -> str:
    """Where xdist goes by groups, a group's name follows the id."""
    at = test.rfind("@")
    return test[:at] if at > test.rfind("]") else test


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
