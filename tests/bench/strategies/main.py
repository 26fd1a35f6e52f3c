"""``make bench-strategies``: what ways of exchanging gradients cost and bring on slow links. Root, Linux.

    python tests/bench/strategies/main.py [--only ROW ...] [--runs N] [--fast] [--list]

Prints the table, writes ``build/bench-strategies.json``, a picture of the losses beside it and
``build/bench-strategies-trace.json`` (open it in ``chrome://tracing`` or https://ui.perfetto.dev), and exits 0: a bar
that was missed is only marked so. Each of four ranks has a network namespace of its own, and a wire whose rate is
limited. The row ``grid``, links by steps between two exchanges, is measured only where it is named. See
``docs/internals/benchmarks.md``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from tests.bench import session  # noqa: E402
from tests.bench.network import can_shape  # noqa: E402
from tests.bench.strategies import apart, links, losses, picture, rates  # noqa: E402


def main() -> None:
    if not can_shape():
        sys.exit("bench-strategies needs root on Linux, with iproute2 and util-linux, and the token bucket (tbf)")
    rows: dict[str, session.Measure] = {
        "bytes": links.sent_bytes,
        "rate": rates.rates,
        "overlap": links.overlap,
        "links": links.links,
        "losses": losses.losses,
        "utilisation": apart.utilisation,
        "losses_apart": apart.losses,
        "unlike": apart.unlike,
        "grid": apart.grid,
    }
    path = ROOT / "build" / "bench-strategies.json"
    options = session.parsed(__doc__, rows, path, fast_runs=1, asked=["grid"])
    code = session.run(options, rows)
    picture.draw(losses.CURVES, ROOT / "build" / "bench-strategies.png")
    picture.draw_on_link(losses.CURVES, path, ROOT / "build" / "bench-strategies-link.png")
    sys.exit(code)


if __name__ == "__main__":
    main()
