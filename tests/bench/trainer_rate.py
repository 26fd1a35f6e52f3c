"""What ``Trainer`` costs: optimizer steps per second beside the same loop by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row

from gpuctl.cluster.worker import WorkerContext
from gpuctl.stacks import processes

BAR = 0.98


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
    subprocess.run([*command, str(script), str(out), steps, turns], check=True, env=env)
    rates = json.loads(out.read_text())
    trainer, hand = rates["trainer"], rates["hand"]
    ratio = median(a / b for a, b in zip(trainer, hand, strict=True))
    ratios = spread([a / b for a, b in zip(trainer, hand, strict=True)])
    note = f"median of {len(trainer)} pairs' ratios {ratio:.3f} ({ratios}); {spread(trainer)} beside {spread(hand)}"
    return Row("trainer_steps", median(trainer), median(hand), "steps/s", f">= {BAR:g} x", ratio >= BAR, note)
