"""``make bench``: every number of the table, ours beside its reference, measured now.

    python tests/bench/main.py [--only ROW ...] [--runs N] [--fast] [--list]

Prints the table, writes ``build/bench.json``, and exits 0: a bar that was missed is only marked so. See
``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from gpuctl.stacks import processes  # noqa: E402
from tests.bench.settings import Settings  # noqa: E402
from tests.bench.table import Row, failed, shown, write  # noqa: E402

ROWS = {
    "notice_steps_redone": "losses:notice",
    "resume_kill_rank0": "losses:kill_rank0",
    "resume_kill_other": "losses:kill_other",
    "resume_silent": "silence:resume_silent",
    "absorb_join": "arrivals:absorb",
    "bitwise": "weights:bitwise",
    "trainer_steps": "trainer_rate:rate",
    "cli_help": "command_line:show_help",
    "cli_status": "command_line:status",
    "mingle_64": "mingling:mingle",
    "launch": "first_round:launch",
}


def main() -> None:
    options = parsed()
    if options.list:
        print("\n".join(ROWS))
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    _clean_environment()
    root = Path(tempfile.mkdtemp(prefix="gpuctl-bench-"))
    settings = Settings(root, options.runs or (2 if options.fast else 5), options.fast)
    rows: list[Row] = []
    code = 0
    try:
        for name in options.only or ROWS:
            rows.append(_measured(name, settings))  # noqa: PERF401 - what was measured before Ctrl-C is shown
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        processes.kill_all(root)
        shutil.rmtree(root, ignore_errors=True)
    print(shown(rows))
    write(rows, options.json)
    sys.exit(code)


def _measured(name: str, settings: Settings) -> Row:
    began = time.monotonic()
    print(f"{name} ...", file=sys.stderr, flush=True)
    module, _, function = ROWS[name].partition(":")
    measure: Callable[[Settings], Row] = getattr(import_module(f"tests.bench.{module}"), function)
    try:
        row = measure(settings)
    except Exception as error:  # noqa: BLE001 - one row that fails must not cost the others
        traceback.print_exc()
        row = failed(name, f"{type(error).__name__}: {error}")
    print(f"{shown([row])}\n  {row.note} ({time.monotonic() - began:.0f} s)\n", file=sys.stderr, flush=True)
    return row


def _clean_environment() -> None:
    """Of whoever runs this: no cluster, no credentials, no proxy; and bytecode is cached, as on any installation."""
    for name in list(os.environ):
        if name.startswith(("GPUCTL_", "AWS_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=ROWS, help="measure these rows only")
    parser.add_argument("--runs", type=int, help="measurements of each kind (default: 5, with --fast 2)")
    parser.add_argument("--fast", action="store_true", help="leave out the references that take a minute each")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench.json", help="where the rows go")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
