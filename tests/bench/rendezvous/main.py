"""``make bench-rendezvous``: how soon machines without a cluster meet, and go on when some are lost. Root, Linux.

    python tests/bench/rendezvous/main.py [--only ROW ...] [--runs N] [--fast] [--list]

Prints the table, writes ``build/bench-rendezvous.json``, and exits 0: a bar that was missed is only marked so. Each pod
has a network namespace of its own, and the bucket is a real S3 server at the switch between them. See
``docs/internals/benchmarks.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from gpuctl.stacks.providers import processes  # noqa: E402
from tests.bench import session  # noqa: E402
from tests.bench.network import is_possible, network, s3_bucket  # noqa: E402
from tests.bench.rendezvous import arrivals, losses, picture  # noqa: E402
from tests.bench.rendezvous.pods import Agents, Torchruns  # noqa: E402
from tests.bench.settings import Settings  # noqa: E402
from tests.bench.table import Row  # noqa: E402

ROWS = ("losses", "orders", "many", "side_by_side", "plugin", "plugin_orders", "train", "train_orders")
_AT_SWITCH = "--at-switch"


def main() -> None:
    if sys.argv[1:2] == [_AT_SWITCH]:
        _measure(*sys.argv[2:])
        return
    if not is_possible():
        sys.exit("bench-rendezvous needs root on Linux, with iproute2 and util-linux")
    rows: dict[str, session.Measure] = {name: partial(_in_a_namespace, name) for name in ROWS}
    options = session.parsed(__doc__, rows, ROOT / "build" / "bench-rendezvous.json", fast_runs=1)
    code = session.run(options, rows)
    picture.draw(ROOT / "build" / "bench-rendezvous.json", ROOT / "build" / "bench-rendezvous.png")
    sys.exit(code)


def _in_a_namespace(name: str, settings: Settings) -> list[Row]:
    """Run this file as the switch between the pods."""
    answer = settings.root / f"{name}.json"
    command = ["unshare", "--net", sys.executable, __file__, _AT_SWITCH, name, str(settings.root), str(settings.runs)]
    env = {**os.environ, processes.MARK: str(settings.root / name)}
    subprocess.run([*command, str(answer)], check=True, env=env)
    return [Row(**row) for row in json.loads(answer.read_text())]


def _measure(name: str, root: str, runs: str, answer: str) -> None:
    with network() as net, s3_bucket() as url:
        folder = Path(root) / name
        if name == "losses":
            rows = losses.mingle(net, url, folder, int(runs))
        elif name == "plugin":
            rows = losses.plugin(net, url, folder, int(runs))
        elif name == "train":
            rows = losses.train(net, url, folder, int(runs))
        elif name == "plugin_orders":
            rows = [arrivals.orders_of(Torchruns, name, net, url, folder, int(runs))]
        elif name == "train_orders":
            rows = [arrivals.orders_of(Agents, name, net, url, folder, int(runs))]
        elif name == "orders":
            rows = [arrivals.orders(net, url, folder, int(runs))]
        elif name == "many":
            rows = [arrivals.many(url, int(runs))]
        else:
            rows = [arrivals.side_by_side(url, int(runs))]
    Path(answer).write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
