"""Writing a checkpoint, or the files that a script keeps, for ``gpuctl ckpt pull``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpuctl.cli.render.terminal import bar
from gpuctl.cluster.checkpoints.export import pull as checkpoints_pull
from gpuctl.cluster.checkpoints.export.pull import OnBytes, OpenCheckpoint
from gpuctl.cluster.distribution import pip_install
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.cluster.storage.bucket import Bucket as Store


def writer_of(form: str) -> Callable[[OpenCheckpoint, Path, OnBytes], None]:
    """The function that writes files of the format ``form``. Raises ``GpuctlError`` where it needs a package that is
    missing."""
    if form == "safetensors":
        from gpuctl.cluster.checkpoints.export.safetensors import write_safetensors

        return write_safetensors
    try:
        from gpuctl.trainers.checkpoint import torch_export  # brings torch
    except ModuleNotFoundError as error:
        raise GpuctlError(
            f"--format {form} needs {error.name}, which is not installed",
            f"{pip_install('train')}, or use --format safetensors",
        ) from error
    return torch_export.write_torch if form == "torch" else torch_export.write_dcp


def pull_files(store: Store, job: str, folder: Path) -> None:
    """Fetch the newest snapshot of a job's files into ``folder``. Raises ``BadInput`` if there is none."""
    files = snapshot_log.newest(store, job)
    if files is None:
        raise no_files(job)
    total = sum(file.size for file in files.files.values())
    with checkpoints_pull.new_files(folder, total) as aside, bar(f"files of {job}", total) as fetched:
        checkpoints_pull.fetch_files(store, job, files, aside, fetched)


def no_files(job: str) -> BadInput:
    """The error for a job that keeps no files."""
    return BadInput(f"job {job} keeps no files", "a script writes them to $GPUCTL_CHECKPOINT_DIR")
