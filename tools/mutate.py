"""Applies bugs to gpuctl one by one, and sees that a test fails for each: ``make mutate``.

The bugs are in ``tools/mutants/<floor>.toml``, each such as somebody could write by mistake::

    [[bug]]
    what = "a node of a job that drains is taken for free"
    function = "cluster/membership/mingle.py::Mingle._busy"
    replace = 'in ("run", "drain")'         # occurs once in that function
    by = '== "run"'
    tests = ["tests/cluster/membership/test_mingle.py::test_no_node_is_in_two_jobs"]

The tests run on a copy of the tree, first as it is (they must pass, or their failing later means nothing), then with
each bug. A bug is killed when a test fails or runs into its time limit. Exit code 1: a bug lives; 2: the list is wrong.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Literal

import msgspec

ROOT = Path(__file__).resolve().parents[1]
LISTS = Path(__file__).parent / "mutants"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", "*.egg-info")
_TEST_S = 90
"""Limit of a test. One that a bug makes hang is killed by it."""
_BUG_S = 600
_Verdict = Literal["killed", "lives", "wrong"]


class WrongList(Exception):
    """Says which bug cannot be applied, and why."""


class Bug(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    function: str
    """``PATH::QUALIFIED.NAME``, or ``PATH::`` for a line outside of functions."""
    replace: str
    by: str
    tests: list[str]

    @property
    def path(self) -> str:
        return self.function.partition("::")[0]

    @property
    def floor(self) -> str:
        return self.path.partition("/")[0]

    def applied(self, source: str) -> str:
        """``source`` with the bug in it. Raises ``WrongList``."""
        begin, end = _span(source, self.function.partition("::")[2])
        body = source[begin:end]
        if (times := body.count(self.replace)) != 1:
            raise WrongList(f"{self.function}: {self.replace!r} occurs {times} times")
        changed = source[:begin] + body.replace(self.replace, self.by) + source[end:]
        try:
            compile(changed, self.path, "exec")
        except SyntaxError as error:
            raise WrongList(f"{self.function}: {self.by!r} is no Python there: {error}") from error
        return changed


class Result(msgspec.Struct, frozen=True):
    bug: Bug
    verdict: _Verdict
    seconds: float
    printed: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="bugs whose text or function holds this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lists", type=Path, default=LISTS)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "mutate.json")
    given = parser.parse_args()
    try:
        bugs = [bug for bug in read(given.lists) if given.only in f"{bug.function} {bug.what}"]
        for bug in bugs:
            bug.applied((given.root / bug.path).read_text())
        return _run(bugs, given.root, given.workers, given.report)
    except WrongList as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def read(lists: Path) -> list[Bug]:
    """Of all floors. Raises ``WrongList``."""
    found: list[Bug] = []
    for path in sorted(lists.glob("*.toml")):
        try:
            found += msgspec.convert(tomllib.loads(path.read_text())["bug"], list[Bug])
        except (msgspec.ValidationError, tomllib.TOMLDecodeError, KeyError) as error:
            raise WrongList(f"{path.name}: {error}") from error
    return found


def _run(bugs: Sequence[Bug], root: Path, workers: int, report: Path) -> int:
    if not bugs:
        raise WrongList("there is no such bug")
    began = time.monotonic()
    with _copies(root, workers) as copies:
        _refuse_failing_tests(bugs, copies)
        numbers = count(1)

        def judge(bug: Bug) -> Result:
            copy = copies.get()
            try:
                result = _judged(bug, copy)
            finally:
                copies.put(copy)
            print(f"{next(numbers)}/{len(bugs)} {result.verdict} in {result.seconds:.0f} s: {bug.function}: {bug.what}")
            return result

        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(judge, bugs))
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    _summarise(results, time.monotonic() - began)
    return 0 if all(result.verdict == "killed" for result in results) else 1


def _refuse_failing_tests(bugs: Sequence[Bug], copies: Queue[Copy]) -> None:
    tests = sorted({test for bug in bugs for test in bug.tests})
    print(f"{len(tests)} tests without any bug")
    copy = copies.get()
    code, printed = copy.test(tests, limit_s=None, more=("-n", str(copies.qsize() + 1)))
    copies.put(copy)
    if code != 0:
        raise WrongList(f"tests fail without any bug:\n{printed}")


def _judged(bug: Bug, copy: Copy) -> Result:
    began = time.monotonic()
    with copy.changed(bug):
        code, printed = copy.test(bug.tests, limit_s=_BUG_S, more=("-x", "-n0"))
    verdict: _Verdict = {0: "lives", 1: "killed"}.get(code, "wrong")  # type: ignore[assignment]
    return Result(bug, verdict, time.monotonic() - began, printed[-2000:])


class Copy:
    """A copy of the tree, with at most one bug in it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(root, folder, symlinks=True, ignore=_LEFT_OUT)
        self._changes = 0

    @contextmanager
    def changed(self, bug: Bug) -> Iterator[None]:
        path = self._folder / bug.path
        before = path.read_text()
        self._write(path, bug.applied(before))
        try:
            yield
        finally:
            self._write(path, before)

    def test(self, tests: Sequence[str], *, limit_s: float | None, more: Sequence[str]) -> tuple[int, str]:
        """Pytest's exit code, and what it printed. One that does not end within ``limit_s`` has found the bug (1)."""
        command = [sys.executable, "-m", "pytest", "-m", "", f"--timeout={_TEST_S}", *more, *tests]
        path = f"{self._folder / 'src'}{os.pathsep}{self._folder}"
        env = {**os.environ, "PYTHONPATH": path, "GPUCTL_TEST_PYTHONPATH": path}  # of pytest, and of what tests start
        with tempfile.TemporaryFile() as out:
            with subprocess.Popen(
                command, cwd=self._folder, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            ) as process:
                try:
                    code = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    code = 1
                finally:
                    _end(process)
            out.seek(0)
            return code, out.read().decode(errors="replace")

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: bytecode is known by whole seconds and the length of its source."""
        path.write_text(text)
        self._changes += 1
        os.utime(path, (self._changes, self._changes))


@contextmanager
def _copies(root: Path, workers: int) -> Iterator[Queue[Copy]]:
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copies: Queue[Copy] = Queue()
        for number in range(workers):
            copies.put(Copy(root, Path(folder) / str(number)))
        yield copies


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # servers that a test has left, too
    except ProcessLookupError:
        return


def _span(source: str, name: str) -> tuple[int, int]:
    """Where the function is in ``source``, its decorators left out. Raises ``WrongList``."""
    if not name:
        return 0, len(source)
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        inside = [one for one in ast.walk(node) if getattr(one, "name", None) == part and one is not node]
        if not inside:
            raise WrongList(f"there is no {name} in that file")
        node = inside[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1], starts[node.end_lineno or node.lineno]


def _summarise(results: Sequence[Result], seconds: float) -> None:
    for result in results:
        if result.verdict != "killed":
            print(f"{result.verdict}: {result.bug.function}: {result.bug.what}\n{result.printed}")
    for floor in dict.fromkeys(result.bug.floor for result in results):
        of_floor = [result for result in results if result.bug.floor == floor]
        killed = sum(result.verdict == "killed" for result in of_floor)
        print(f"{floor:10} {killed} of {len(of_floor)} killed")
    killed = sum(result.verdict == "killed" for result in results)
    print(f"{killed} of {len(results)} bugs killed in {seconds / 60:.0f} minutes")


if __name__ == "__main__":
    sys.exit(main())
