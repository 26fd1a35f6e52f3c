"""``make bench-needs``: what a script's packages cost: the first build, a replacement, the start of a round.

    python tests/bench/needs/main.py [--only ROW ...] [--runs N] [--fast] [--list]

Prints the table, writes ``build/bench-needs.json``, and exits 0: a bar that was missed is only marked so. The packages
come from the index that uv is set up for. See ``docs/internals/benchmarks.md``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from tests.bench import session  # noqa: E402
from tests.bench.needs import building, replacing, starting  # noqa: E402

ROWS: dict[str, session.Measure] = {
    "build": building.build,
    "replacement": replacing.replacement,
    "round_start": starting.round_start,
}


def main() -> None:
    options = session.parsed(__doc__, ROWS, ROOT / "build" / "bench-needs.json", fast_runs=1)
    sys.exit(session.run(options, ROWS))


if __name__ == "__main__":
    main()
