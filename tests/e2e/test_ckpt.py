"""From a training on two nodes to its model on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.machine import Cluster

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


def test_a_pulled_model_is_as_good_as_the_training_said(cluster: Cluster) -> None:
    shutil.copy(DIGITS, cluster.folder)
    cluster.up("2")
    trained = cluster.run("train", "digits.py", "--", "--steps", "120", "--checkpoint-every", "60").stdout
    (accuracy,) = [line.rpartition(" ")[2] for line in trained.splitlines() if "accuracy=" in line]
    assert cluster.run("ckpt", "verify").stdout == "step 60: whole\nstep 120: whole\n"
    cluster.run("ckpt", "pull", "last", "pulled")
    assert evaluated(cluster, "pulled") == (0, f"{accuracy}\n", "")
    assert float(accuracy.removeprefix("accuracy=")) > 0.8
    code, _, said = evaluated(cluster, "nowhere")
    assert (code, said) == (1, "there is no model.pt in nowhere: gpuctl ckpt pull last nowhere\n")


def evaluated(cluster: Cluster, folder: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "digits.py", "--eval", folder],
        cwd=cluster.folder,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr
