"""From a training on two nodes to its model on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from gpuctl.cluster.snapshots import maintenance
from tests.e2e.machine import Cluster
from tests.paths import ROOT

DIGITS = ROOT / "examples" / "digits.py"


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


KEEPS_FILES = """
    import os, pathlib, time
    folder = pathlib.Path(os.environ["GPUCTL_CHECKPOINT_DIR"])
    for n in range(3):
        (folder / f"{n}.ckpt").write_bytes(os.urandom(1000))
    while not pathlib.Path(os.environ["ENOUGH"]).exists():
        time.sleep(0.05)
    (folder / "last.ckpt").write_bytes(os.urandom(1000))
"""


@pytest.mark.slow
def test_files_of_a_script_are_verified_and_deleted_once_its_job_is_over(cluster: Cluster) -> None:
    cluster.up("1")
    enough = cluster.folder / "enough"
    job = cluster.train("--env", f"ENOUGH={enough}", cluster.write("keeps.py", KEEPS_FILES))
    cluster.wait(lambda: maintenance.sets(cluster.bucket, job), "a set of files")
    assert cluster.run("ckpt", "verify").stdout == "files: whole\n"
    assert f"error: job {job} is still running" in cluster.run("ckpt", "rm", "all", "-y", code=1).stderr
    enough.touch()
    cluster.wait_for_end(job)
    assert cluster.run("ckpt", "verify").stdout == "files of the set before: whole\nfiles: whole\n"
    assert cluster.run("ckpt", "rm", "all", "-y").stdout == (
        f"deleted the script's files of {job}, which freed 4.0 kB\n"
    )
    assert maintenance.objects(cluster.bucket, job) == []


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
