"""``make bench-checkpoint``: saves and restores of 1 GiB beside the references, all against one server, measured now.

    python tests/bench/checkpoint/main.py [--only ROW ...] [--runs N] [--fast] [--list]

Prints the table, writes ``build/bench-checkpoint.json``, and exits 0: a bar that was missed is only marked so. See
``docs/internals/benchmarks.md``.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from tests.bench import session  # noqa: E402
from tests.bench.checkpoint.disturbance import gil_stall, step_p99  # noqa: E402
from tests.bench.checkpoint.field import Field  # noqa: E402
from tests.bench.checkpoint.memory import memory  # noqa: E402
from tests.bench.checkpoint.replicas import four_ranks  # noqa: E402
from tests.bench.checkpoint.survivors import survivors  # noqa: E402
from tests.bench.checkpoint.transfers import Transfers, blocked  # noqa: E402


def main() -> None:
    with ExitStack() as stack:
        field = Field(stack)
        transfers = Transfers(field)
        rows: dict[str, session.Measure] = {
            "save": transfers.saves,
            "restore": transfers.restores,
            "blocked": lambda settings: blocked(field, settings),
            "step_p99": lambda settings: step_p99(field, settings),
            "gil_stall": lambda settings: gil_stall(field, settings),
            "memory": lambda settings: memory(field, settings),
            "four_ranks": lambda settings: four_ranks(field, settings),
            "survivors": survivors,
        }
        options = session.parsed(__doc__, rows, ROOT / "build" / "bench-checkpoint.json", fast_runs=1)
        code = session.run(options, rows)
    sys.exit(code)


if __name__ == "__main__":
    main()
