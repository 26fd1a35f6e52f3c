from __future__ import annotations

import subprocess
import sys


def test_a_name_brings_what_it_needs_and_no_more() -> None:
    """A codec needs torch, but neither the bucket's client nor the checkpoints."""
    code = """
import sys, gpuctl
assert "torch" not in sys.modules, "import gpuctl"
gpuctl.TopK
heavy = {"obstore", "gpuctl.trainers.checkpoint.checkpointer", "gpuctl.trainers.trainer"} & set(sys.modules)
assert "torch" in sys.modules and not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
