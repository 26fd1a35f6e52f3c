"""What ``Trainer`` costs: optimizer steps per second beside the same loop by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

from gpuctl.cluster.worker import WorkerContext
from gpuctl.stacks import processes
from tests.bench.settings import Settings
from tests.bench.table import Row

BAR = 0.98
LOG_EVERY = 10


def rate(settings: Settings) -> Row:
    """Two gloo ranks, in turns, as in a gpuctl job: the files that the agent reads are written."""
    root = settings.root / "rate"
    root.mkdir()
    out = root / "rates.json"
    context = WorkerContext(
        cluster="bench",
        bucket=f"file://{root}/bucket",
        job="rate-1",
        round=1,
        node="node-0",
        round_dir=root,
        checkpoint_dir=root / "checkpoints",
        tensorboard_dir=root / "tensorboard",
    )
    env = {**os.environ, **context.env(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"BENCH_LINES": str(root / "lines"), processes.MARK: str(root)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Short turns, many of them: what else this machine does then hits both sides alike.
    steps, turns = "100", "10" if settings.fast else "30"
    script = Path(__file__).with_name("two_loops.py")
    subprocess.run([*command, str(script), str(out), steps, turns, str(LOG_EVERY)], check=True, env=env)
    blocks = json.loads(out.read_text())
    trainer, hand = (_quiet_rate(blocks[name]) for name in ("trainer", "hand"))
    middle = median(blocks["hand"]) / median(blocks["trainer"])
    note = f"lower quartile of {len(blocks['hand'])} blocks of {LOG_EVERY} steps; at the median {middle:.3f} x"
    return Row("trainer_steps", trainer, hand, "steps/s", f">= {BAR:g} x", trainer >= BAR * hand, note)


def _quiet_rate(blocks: list[float]) -> float:
    """Steps per second at the lower quartile: what else this machine does can only make a block slower."""
    return LOG_EVERY / quantiles(blocks, n=4)[0]
