"""A job's code on a node, and what its launcher makes of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gpuctl.bootstrap.jobs.workspace import JobWorkspace
from gpuctl.cluster import layout
from gpuctl.cluster.jobs import code_archive
from gpuctl.cluster.jobs.code_survey import look_over
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.worker_context import STRATEGY_READ


def _workspace(
    tmp_path: Path, script: str = "train.py", launcher: str = "torchrun", strategy: str = "", **env: str
) -> JobWorkspace:
    bucket = open_bucket(f"file://{tmp_path}/bucket")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("import json\n")
    with code_archive.packed(look_over(tmp_path / "code").items) as code:
        code_archive.upload(bucket, code)
    spec = JobSpec(
        job="train-1", number=1, script=script, code=code.digest, launcher=launcher, strategy=strategy, env=env
    )
    bucket.put(layout.job_spec("train-1"), encode(spec))
    return JobWorkspace(bucket, tmp_path / "node" / "train-1", "train-1")


def test_the_script_is_unpacked_and_its_imports_are_known(tmp_path: Path) -> None:
    workspace = _workspace(tmp_path)
    workspace.prepare()
    assert Path(workspace.program).read_text() == "import json\n"
    assert workspace.imports() == ["json"]


def test_only_torchruns_workers_are_forked_from_what_has_imported_it_all(tmp_path: Path) -> None:
    workspace = _workspace(tmp_path, launcher="jax")
    workspace.prepare()
    assert workspace.imports() == []


def test_a_program_that_is_not_in_the_folder_is_one_of_the_nodes(tmp_path: Path) -> None:
    workspace = _workspace(tmp_path, "mpirun", "exec")
    workspace.prepare()
    assert workspace.program == "mpirun"


@pytest.mark.parametrize(
    ("launcher", "env", "number"),
    [
        ("torchrun", {}, signal.SIGTERM),
        ("jax", {}, signal.SIGUSR1),
        ("jax", {"GPUCTL_STOP_SIGNAL": "TERM"}, signal.SIGTERM),
    ],
)
def test_the_stop_signal_is_the_launchers_unless_the_job_says_otherwise(
    tmp_path: Path, launcher: str, env: dict[str, str], number: int
) -> None:
    workspace = _workspace(tmp_path, launcher=launcher, **env)
    assert workspace.stop_signal == signal.SIGTERM, "nobody is there to be asked yet"
    workspace.prepare()
    assert workspace.stop_signal == number


@pytest.mark.parametrize(("strategy", "told"), [("", {}), ("topk:ratio=0.01", {"GPUCTL_STRATEGY": "topk:ratio=0.01"})])
def test_workers_have_the_variables_of_the_job_before_those_of_the_node(
    tmp_path: Path, strategy: str, told: dict[str, str]
) -> None:
    """Whoever ran `gpuctl up` for local nodes may have had settings of their own, which are for no other's job."""
    workspace = _workspace(tmp_path, strategy=strategy, A="job", B="job")
    workspace.prepare()
    node = {"A": "node", "C": "node", "GPUCTL_STRATEGY": "int8", "GPUCTL_LAUNCHER": "jax"}
    assert workspace.worker_env(node) == {"A": "job", "B": "job", "C": "node", **told}


@pytest.mark.parametrize(
    ("strategy", "is_read", "said"),
    [
        ("topk:ratio=0.01", False, "--strategy topk:ratio=0.01 had no effect: the script makes no gpuctl.Trainer"),
        ("topk:ratio=0.01", True, ""),
        ("", False, ""),
    ],
)
def test_a_strategy_that_nobody_has_read_is_told(tmp_path: Path, strategy: str, is_read: bool, said: str) -> None:
    workspace = _workspace(tmp_path, strategy=strategy)
    workspace.prepare()
    workspace.round_dir(3).mkdir(parents=True)
    if is_read:
        (workspace.round_dir(3) / STRATEGY_READ).touch()
    assert workspace.unused_strategy(3) == said
