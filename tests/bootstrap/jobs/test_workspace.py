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


def _workspace(tmp_path: Path, script: str = "train.py", launcher: str = "torchrun", **env: str) -> JobWorkspace:
    bucket = open_bucket(f"file://{tmp_path}/bucket")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("import json\n")
    with code_archive.packed(look_over(tmp_path / "code").items) as code:
        code_archive.upload(bucket, code)
    spec = JobSpec(job="train-1", number=1, script=script, code=code.digest, launcher=launcher, env=env)
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
