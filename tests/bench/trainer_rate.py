"""What ``Trainer`` costs: optimizer steps per second beside the same loop by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.stacks.providers import processes
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
    blocks = "100" if settings.fast else "400"
    script = Path(__file__).with_name("two_loops.py")
    subprocess.run([*command, str(script), str(out), blocks, str(LOG_EVERY)], check=True, env=env)
    pairs = json.loads(out.read_text())
    trainer, hand = (LOG_EVERY / median(seconds) for seconds in zip(*pairs, strict=True))
    ratios = sorted(by_hand / by_trainer for by_trainer, by_hand in pairs)
    ratio = median(ratios)
    low, _, high = quantiles(ratios, n=4)
    note = f"ratio: median of {len(pairs)} pairs of {LOG_EVERY} steps, the middle half of them {low:.3f}-{high:.3f}"
    return Row("trainer_steps", trainer, hand, "steps/s", f">= {BAR:g} x", ratio >= BAR, note, paired=ratio)
