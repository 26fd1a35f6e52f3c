"""One run of a bench, from its command line to its table. What is measured is the caller's."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from gpuctl.stacks.providers import processes
from tests.bench.settings import Settings
from tests.bench.table import Row, failed, joined, shown, shown_runs, write

Measure = Callable[[Settings], Sequence[Row]]


def parsed(
    description: str | None, rows: Mapping[str, Measure], json: Path, *, fast_runs: int, asked: Sequence[str] = ()
) -> argparse.Namespace:
    """The command line; ``json`` is where the rows go by default. Those in ``asked`` are measured if they are named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="ROW", choices=rows, help="measure these rows only"
    )
    parser.add_argument("--runs", type=int, help=f"measurements of each kind (default: 5, with --fast {fast_runs})")
    parser.add_argument(
        "--repeat", type=int, default=1, help="run all that so often; a bar is met when each run meets it"
    )
    parser.add_argument("--fast", action="store_true", help="a quick look: see docs/internals/benchmarks.md")
    parser.add_argument("--json", type=Path, default=json, help="where the rows go")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    options = parser.parse_args()
    options.only = options.only or [name for name in rows if name not in asked]
    options.runs = options.runs or (fast_runs if options.fast else 5)
    return options


def run(options: argparse.Namespace, rows: Mapping[str, Measure]) -> int:
    """Measure, print, write; the exit code. Nothing that was started lives on, also after Ctrl-C."""
    if options.list:
        print("\n".join(rows))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    _clean_environment()
    root = Path(tempfile.mkdtemp(prefix="gpuctl-bench-"))
    runs: list[list[Row]] = []
    code = 0
    try:
        for turn in range(options.repeat):
            settings = Settings(root / str(turn), options.runs, options.fast)
            settings.root.mkdir()
            runs.append([])
            for name in options.only:
                runs[-1] += _measured(name, rows[name], settings)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        processes.kill_all(root)
        shutil.rmtree(root, ignore_errors=True)
    if len(runs) > 1:
        print(f"{shown_runs(runs)}\n")
    found = joined(runs)
    print(shown(found))
    write(found, options.json)
    return code


def _measured(name: str, measure: Measure, settings: Settings) -> Sequence[Row]:
    began = time.monotonic()
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        rows = measure(settings)
    except Exception as error:  # noqa: BLE001 - one row that fails must not cost the others
        traceback.print_exc()
        rows = [failed(name, f"{type(error).__name__}: {error}")]
    notes = "".join(f"  {row.note}\n" for row in rows if row.note)
    print(f"{shown(rows)}\n{notes}  ({time.monotonic() - began:.0f} s)\n", file=sys.stderr, flush=True)
    return rows


def _clean_environment() -> None:
    """Of whoever runs this: no cluster, no credentials, no proxy; and bytecode is cached, as on any installation."""
    for name in list(os.environ):
        if name.startswith(("GPUCTL_", "AWS_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
