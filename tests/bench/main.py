"""``make bench``: every number of the table, ours beside its reference, measured now.

    python tests/bench/main.py [--only ROW ...] [--runs N] [--fast] [--list]

Prints the table, writes ``build/bench.json``, and exits 0: a bar that was missed is only marked so. See
``docs/internals/benchmarks.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from tests.bench import session  # noqa: E402
from tests.bench.settings import Settings  # noqa: E402
from tests.bench.table import Row  # noqa: E402

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
    rows: dict[str, session.Measure] = {name: partial(_measured, where) for name, where in ROWS.items()}
    options = session.parsed(__doc__, rows, ROOT / "build" / "bench.json", fast_runs=2)
    sys.exit(session.run(options, rows))


def _measured(where: str, settings: Settings) -> Sequence[Row]:
    """Imported only now, so that a row costs another one nothing."""
    module, _, function = where.partition(":")
    row: Row = getattr(import_module(f"tests.bench.{module}"), function)(settings)
    return [row]


if __name__ == "__main__":
    main()
