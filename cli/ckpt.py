"""``gpuctl ckpt``"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster, Output, parse_flag, text_option, wants_json, whole_number
from gpuctl.cli.terminal import ago, bar, confirm, count, number, out, out_json, say, size, table
from gpuctl.cli.verbs import TextCommand, new_app
from gpuctl.cluster import checkpoints, filesets, jobs, keptfiles, pulled
from gpuctl.cluster.bucket import Bucket as Store
from gpuctl.cluster.checkpoints import Checked
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.pulled import OnBytes, Opened
from gpuctl.cluster.records import CheckpointEntry, FileSet
from gpuctl.cluster.retention import Retention

app = new_app(name="ckpt", help="List, fetch, check or delete a job's checkpoints.")

FORMATS = ("torch", "dcp", "safetensors")

Copies = Mapping[str, Sequence[str]]
"""By a checkpoint's path: the nodes whose disks have copies of it."""

Job = Annotated[str | None, text_option("--job", "-j", metavar="JOB", about="Default: the newest.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command(cls=TextCommand)
def ls(job: Job = None, output: Output = "text", cluster: Cluster = None, bucket: Bucket = None) -> None:
    """List a job's checkpoints, the newest last.

    ADDED is what was uploaded for it; the rest of it belongs to earlier ones as well. TIER says where it is: nodes keep
    copies of the last one on their disks. Files that the script keeps in
    $GPUCTL_CHECKPOINT_DIR are told in a line of their own.
    """
    as_json = wants_json(output)
    store, name = _job(job, cluster, bucket)
    entries = checkpoints.committed(store, name)
    found = checkpoints.check(store, name, entries)
    copies = checkpoints.copies(store, name, entries)
    files = filesets.newest(store, name)
    if as_json:
        checked = [_as_json(one, copies) for one in found]
        out_json({"job": name, "checkpoints": checked, "files": _files_as_json(files) if files else None})
        return
    if found:
        _print_table(found, copies)
    if files:
        many, total = len(files.files), sum(file.size for file in files.files.values())
        out(f"files of the script: {many}, {size(total)}, kept {ago(files.at)} in round {files.round}")
    if not found and not files:
        say(f"job {name} has no checkpoint")


@app.command(cls=TextCommand)
def pull(
    step: Annotated[str, typer.Argument(metavar="STEP", help="One that `gpuctl ckpt ls` shows, last, or files.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where to; new or empty.")],
    form: Annotated[
        str, text_option("--format", "-f", metavar="torch|dcp|safetensors", about="Of the files (default: torch).")
    ] = "torch",
    job: Job = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Fetch a checkpoint, checked, as files that need no gpuctl.

    torch: model.pt, optimizer.pt and so on, for torch.load. dcp: for torch.distributed.checkpoint.load. safetensors:
    model.safetensors and so on, and values.json. With files in place of a step: what the script keeps in
    $GPUCTL_CHECKPOINT_DIR, as it is.
    """
    # Its parts as they lie in the bucket would be of use to nobody: only ``Checkpointer`` reads them, and it reads
    # them there. One file for each item of the state lets whoever wants the weights leave the optimizer unread.
    if form not in FORMATS:
        raise BadInput(f"--format {form} is not a format", "use torch, dcp or safetensors")
    store, name = _job(job, cluster, bucket)
    if step == "files":
        _pull_files(store, name, Path(folder))
        out(folder)
        return
    entry = checkpoints.find(store, name, step)
    write = _writer(form)
    with pulled.reading(store, name, entry):
        opened = pulled.open_entry(store, name, entry)
        room = opened.tensor_bytes * (1 if form == "safetensors" else 2)
        with (
            pulled.new_files(Path(folder), room) as aside,
            bar(f"step {entry.step} of {name}", opened.bytes_to_read) as fetched,
        ):
            write(opened, aside, fetched)
            pulled.write_about(opened, aside)
    out(folder)


@app.command(cls=TextCommand)
def rm(
    steps: Annotated[
        list[str], typer.Argument(metavar="STEP...", help="Steps that `gpuctl ckpt ls` shows, files, or all.")
    ],
    job: Job = None,
    yes: Yes = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Delete checkpoints.

    files are those that the script keeps in $GPUCTL_CHECKPOINT_DIR: all of them, once the job is over.
    """
    store, name = _job(job, cluster, bucket)
    chosen = _chosen(store, name, steps)
    files = keptfiles.objects(store, name) if _means_files(steps) else []
    if "files" in steps and not files:
        raise _no_files(name)
    if not chosen and not files:
        say(f"job {name} has no checkpoint")
        return
    if files:
        keptfiles.check_over(store, name)
    what = _words(chosen, "the script's files" if files else "", name)
    frees = (checkpoints.freed(store, name, chosen) if chosen else 0) + sum(entry.size for entry in files)
    _ask(f"Delete {what}? That frees {size(frees)}.", yes)
    freed = checkpoints.remove(store, name, chosen) if chosen else 0
    freed += keptfiles.remove(store, name) if files else 0
    out(f"deleted {what}, which freed {size(freed)}")


@app.command(cls=TextCommand)
def verify(
    step: Annotated[
        str, typer.Argument(metavar="[STEP]", help="One that `gpuctl ckpt ls` shows, last, files, or all.")
    ] = "all",
    job: Job = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Read a job's checkpoints again and check every byte.

    files are those that the script keeps in $GPUCTL_CHECKPOINT_DIR: the newest set of them, and the one before.
    """
    store, name = _job(job, cluster, bucket)
    chosen = _chosen(store, name, [step])
    kept = keptfiles.sets(store, name) if _means_files([step]) else ()
    if step == "files" and not kept:
        raise _no_files(name)
    everything = checkpoints.check(store, name, checkpoints.committed(store, name)) if chosen else []
    paths = {entry.path for entry in chosen}
    looked_at = [one for one in everything if one.entry.path in paths]
    if not looked_at and not kept:
        say(f"job {name} has no checkpoint")
        return
    total = checkpoints.bytes_to_verify(looked_at) + keptfiles.bytes_to_verify(kept)
    with bar(_words(looked_at, "files" if kept else "", name), total) as read:
        verified = checkpoints.verify(store, name, looked_at, read) if looked_at else []
        files = keptfiles.verify(store, name, kept, read)
    for one in verified:
        _tell(f"step {one.entry.step}", [fault.what for fault in one.faults])
    for entry in chosen:
        if all(one.entry.path != entry.path for one in verified):
            out(f"step {entry.step}: removed meanwhile")
    for one_set in kept:
        faults = next((one.faults for one in files if one.kept is one_set), None)
        which = "files" if one_set is kept[-1] else "files of the set before"
        if faults is None:
            out(f"{which}: removed meanwhile")
        else:
            _tell(which, faults)
    _refuse_damaged(verified, everything, files)


@app.command(cls=TextCommand)
def gc(
    keep_last: Annotated[
        str | None,
        text_option("--keep-last", metavar="K", about="Keep the newest K (default: all; 3 with a rule below)."),
    ] = None,
    keep_every: Annotated[
        str | None, text_option("--keep-every", metavar="M", about="And the first of each M steps.")
    ] = None,
    keep_best: Annotated[
        str | None, text_option("--keep-best", metavar="METRIC[:min|max]", about="And the one with the least or most.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    job: Job = None,
    yes: Yes = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Delete what is left of broken-off checkpoints, and those that no rule keeps.

    The job may run meanwhile: nothing that it still needs goes.
    """
    retention = _retention(keep_last, keep_every, keep_best)
    store, name = _job(job, cluster, bucket)
    found = checkpoints.garbage(store, name, retention)
    if not found.dropped and not found.left:
        say(f"job {name} has nothing to delete")
        return
    for entry in found.dropped:
        out(f"step {entry.step}: no rule keeps it")
    if found.left:
        out(f"{count(len(found.left), 'object')} that no checkpoint needs, left by rounds that are over")
    if dry_run:
        say(f"all this would free {size(found.frees)}; nothing was deleted")
        return
    _ask(f"Delete this? That frees {size(found.frees)}.", yes)
    out(f"freed {size(checkpoints.collect(store, name, found))}")


def _job(job: str | None, cluster: str | None, bucket: str | None) -> tuple[Store, str]:
    store = reach(cluster, bucket).store
    return store, jobs.find(store, job).job


def _chosen(store: Store, job: str, steps: Sequence[str]) -> list[CheckpointEntry]:
    if list(steps) == ["all"]:
        return list(checkpoints.committed(store, job))
    found = {entry.path: entry for entry in (checkpoints.find(store, job, step) for step in steps if step != "files")}
    return list(found.values())


def _means_files(steps: Sequence[str]) -> bool:
    return "files" in steps or list(steps) == ["all"]


def _no_files(job: str) -> BadInput:
    return BadInput(f"job {job} keeps no files", "a script writes them to $GPUCTL_CHECKPOINT_DIR")


def _words(chosen: Sequence[object], files: str, job: str) -> str:
    """What a verb is about: "2 checkpoints and the script's files of digits-1"."""
    many = count(len(chosen), "checkpoint") if chosen else ""
    return f"{' and '.join(filter(None, (many, files)))} of {job}"


def _ask(question: str, yes: bool) -> None:
    if not yes and not confirm(question, unattended=False):
        raise GpuctlError("nothing was deleted", "answer y, or add -y")


def _writer(form: str) -> Callable[[Opened, Path, OnBytes], None]:
    if form == "safetensors":
        from gpuctl.cluster.safetensors import write_safetensors

        return write_safetensors
    try:
        from gpuctl.trainers import export  # brings torch
    except ModuleNotFoundError as error:
        raise GpuctlError(
            f"--format {form} needs {error.name}, which is not installed",
            "pip install 'gpuctl[train]', or use --format safetensors",
        ) from error
    return export.write_torch if form == "torch" else export.write_dcp


def _pull_files(store: Store, job: str, folder: Path) -> None:
    files = filesets.newest(store, job)
    if files is None:
        raise _no_files(job)
    total = sum(file.size for file in files.files.values())
    with pulled.new_files(folder, total) as aside, bar(f"files of {job}", total) as fetched:
        pulled.fetch_files(store, job, files, aside, fetched)


def _retention(last: str | None, every: str | None, best: str | None) -> Retention | None:
    """``None``: all stay."""
    if last is None and every is None and best is None:
        return None
    metric, _, way = (best or "").partition(":")
    if way not in ("", "min", "max") or (best is not None and not metric):
        raise BadInput(f"--keep-best {best} is not a metric and a way", "use one such as loss, or accuracy:max")
    return Retention(
        last=parse_flag("--keep-last", last, whole_number(1)) or Retention().last,
        every=parse_flag("--keep-every", every, whole_number(1)),
        best=metric or None,
        best_is="max" if way == "max" else "min",
    )


def _print_table(found: Sequence[Checked], copies: Copies) -> None:
    header = ["STEP", "SIZE", "ADDED", "ROUND", "SAVED", "REASON", "STATE", "TIER"]
    with_metrics = any(one.entry.metrics for one in found)
    rows = [_row(one, copies, with_metrics) for one in found]
    for line in table([*header, *(["METRICS"] if with_metrics else [])], rows, give=[8] if with_metrics else []):
        out(line)
    for one in found:
        if not one.whole:
            more = f" (and {len(one.faults) - 1} more)" if len(one.faults) > 1 else ""
            say(f"step {one.entry.step} is damaged: {one.faults[0].what}{more}")


def _row(one: Checked, copies: Copies, with_metrics: bool) -> list[str]:
    entry = one.entry
    near = copies.get(entry.path, ())
    row = [
        str(entry.step),
        size(entry.bytes),
        size(entry.written),
        str(entry.round),
        ago(entry.at),
        entry.reason,
        "whole" if one.whole else "damaged",
        f"{count(len(near), 'node')}, bucket" if near else "bucket",
    ]
    if with_metrics:
        row.append(" ".join(f"{name}={number(value)}" for name, value in entry.metrics.items()) or "-")
    return row


def _tell(what: str, faults: Sequence[str]) -> None:
    out(f"{what}: {'damaged' if faults else 'whole'}")
    for fault in faults:
        out(f"  {fault}")


def _refuse_damaged(
    verified: Sequence[Checked], everything: Sequence[Checked], files: Sequence[keptfiles.Checked]
) -> None:
    """Fail if any is damaged, and say what a restore takes then: those not read just now count by their sizes."""
    said, useless = [], []
    if damaged := [one.entry for one in verified if not one.whole]:
        known = {one.entry.path: one for one in [*everything, *verified]}
        restored = checkpoints.restored(list(known.values()))
        takes = f"takes step {restored.step}" if restored else "finds none"
        said.append(f"step {', '.join(str(entry.step) for entry in damaged)}; a restore {takes}")
        useless += [str(entry.step) for entry in damaged]
    if any(not one.whole for one in files):
        left = [one.kept for one in files if one.whole]
        takes = f"takes those of {ago(left[-1].at)}" if left else "finds none"
        said.append(f"files; a restore {takes}")
        useless += [] if left else ["files"]
    if said:
        hint = f"delete it: gpuctl ckpt rm {' '.join(useless)}" if useless else ""
        raise GpuctlError(f"damaged: {'; '.join(said)}", hint)


def _as_json(one: Checked, copies: Copies) -> dict[str, Any]:
    entry = one.entry
    return {
        "step": entry.step,
        "bytes": entry.bytes,
        "written": entry.written,
        "round": entry.round,
        "ranks": entry.world,
        "at": entry.at,
        "age_s": max(0.0, time.time() - entry.at),
        "took_s": entry.took_s,
        "reason": entry.reason,
        "left_s": entry.left_s,
        "whole": one.whole,
        "faults": [fault.what for fault in one.faults],
        "nodes": copies.get(entry.path, ()),
        "metrics": entry.metrics,
        "path": entry.path,
    }


def _files_as_json(files: FileSet) -> dict[str, Any]:
    sizes = {path: file.size for path, file in files.files.items()}
    return {"round": files.round, "at": files.at, "bytes": sum(sizes.values()), "sizes": sizes}
