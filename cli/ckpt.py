"""``gpuctl ckpt``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster, Output, text_option, wants_json
from gpuctl.cli.terminal import ago, bar, confirm, count, out, out_json, say, size, table
from gpuctl.cli.verbs import TextCommand, new_app
from gpuctl.cluster import checkpoints, jobs
from gpuctl.cluster.bucket import Bucket as Store
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records import CheckpointEntry

app = new_app(name="ckpt", help="List, fetch or delete a job's checkpoints.")

Job = Annotated[str | None, text_option("--job", "-j", metavar="JOB", about="Default: the newest.")]


@app.command(cls=TextCommand)
def ls(job: Job = None, output: Output = "text", cluster: Cluster = None, bucket: Bucket = None) -> None:
    """List a job's checkpoints, the newest last."""
    as_json = wants_json(output)
    store = reach(cluster, bucket).store
    name = jobs.find(store, job).job
    entries = checkpoints.committed(store, name)
    if as_json:
        out_json([_as_json(entry) for entry in entries])
    elif entries:
        rows = [
            (str(e.step), str(e.round), str(e.world), str(len(e.sha256)), size(e.bytes), ago(e.at)) for e in entries
        ]
        for line in table(("STEP", "ROUND", "RANKS", "FILES", "SIZE", "SAVED"), rows):
            out(line)
    else:
        say(f"job {name} has no checkpoint")


@app.command(cls=TextCommand)
def pull(
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step that `gpuctl ckpt ls` shows, or last.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where to; it is made if need be.")],
    job: Job = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Fetch the files of a checkpoint and check them."""
    store = reach(cluster, bucket).store
    name = jobs.find(store, job).job
    entry = _find(store, name, step)
    with bar(f"step {entry.step} of {name}", entry.bytes) as fetched:
        checkpoints.pull(store, name, entry, Path(folder), fetched)
    out(folder)


@app.command(cls=TextCommand)
def rm(
    steps: Annotated[list[str], typer.Argument(metavar="STEP...", help="Steps that `gpuctl ckpt ls` shows, or all.")],
    job: Job = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Delete checkpoints."""
    store = reach(cluster, bucket).store
    name = jobs.find(store, job).job
    chosen = checkpoints.committed(store, name) if steps == ["all"] else [_find(store, name, step) for step in steps]
    what = f"{count(len(chosen), 'checkpoint')} of {name} ({size(sum(entry.bytes for entry in chosen))})"
    if not yes and not confirm(f"Delete {what}?", unattended=False):
        raise GpuctlError("nothing was deleted", "answer y, or add -y")
    checkpoints.remove(store, name, chosen)
    out(f"deleted {what}")


def _find(store: Store, job: str, step: str) -> CheckpointEntry:
    entries = checkpoints.committed(store, job)
    if step == "last" and entries:
        return entries[-1]
    for entry in entries:
        if str(entry.step) == step:
            return entry
    steps = ", ".join(str(entry.step) for entry in entries)
    raise BadInput(f"job {job} has no checkpoint of step {step}", f"it has: {steps or 'none'}")


def _as_json(entry: CheckpointEntry) -> dict[str, object]:
    return {
        "step": entry.step,
        "round": entry.round,
        "ranks": entry.world,
        "bytes": entry.bytes,
        "at": entry.at,
        "path": entry.path,
        "sha256": entry.sha256,
    }
