"""``gpuctl ckpt``: lists, fetches, checks and deletes a job's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpuctl.cli.commands.jobs.ckpt_pull import no_files, pull_files, writer_of
from gpuctl.cli.render.checkpoints import checkpoint_as_json, files_as_json, print_table, say_damage
from gpuctl.cli.render.terminal import ago, bar, confirm, count, out, out_json, say, size
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, parse_flag, text_option, wants_json, whole_number
from gpuctl.cli.text_commands import TextCommand, new_app
from gpuctl.cluster.checkpoints import deletion, listing, verification
from gpuctl.cluster.checkpoints.export import pull as checkpoints_pull
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.checkpoints.verification import CheckpointCheck
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.snapshots import maintenance as snapshots_maintenance
from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.cluster.storage.bucket import Bucket as Store

app = new_app(name="ckpt", help="List, fetch, check or delete a job's checkpoints.")
FORMATS = ("torch", "dcp", "safetensors")
Job = Annotated[str | None, text_option("--job", "-j", metavar="JOB", about="Job id (default: the newest).")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command(cls=TextCommand)
def ls(job: Job = None, output: Output = "text", cluster: Cluster = None, bucket: Bucket = None) -> None:
    """List a job's checkpoints, the newest last.

    ADDED is what was uploaded for it; the rest of it belongs to earlier ones as well. LOCATION says where it is: nodes
    keep copies of the last one on their disks. Files that the script keeps in $GPUCTL_CHECKPOINT_DIR are listed on a
    line of their own.
    """
    as_json = wants_json(output)
    store, name = _job_with("checkpoints", job, cluster, bucket)
    entries = listing.committed(store, name)
    found = verification.check(store, name, entries)
    copies = listing.copies(store, name, entries)
    files = snapshot_log.newest(store, name)
    if as_json:
        checked = [checkpoint_as_json(one, copies) for one in found]
        out_json({"job": name, "checkpoints": checked, "files": files_as_json(files) if files else None})
        return
    if found:
        print_table(found, copies)
    if files:
        many, total = len(files.files), sum(file.size for file in files.files.values())
        out(f"files of the script: {many}, {size(total)}, kept {ago(files.at)} in round {files.round}")
    if not found and not files:
        say(f"job {name} has no checkpoint")


@app.command(cls=TextCommand)
def pull(
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step shown by `gpuctl ckpt ls`, or last, or files.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Destination; new or empty.")],
    form: Annotated[
        str,
        text_option("--format", "-f", metavar="torch|dcp|safetensors", about="Format of the files (default: torch)."),
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
    only_files = step == "files"
    what = "files" if only_files else "checkpoints"
    store, name = _job_with(what, job, cluster, bucket, steps=not only_files, files=only_files)
    if only_files:
        pull_files(store, name, Path(folder))
        out(folder)
        return
    entry = listing.find(store, name, step)
    write = writer_of(form)
    with checkpoints_pull.reading(store, name, entry):
        opened = checkpoints_pull.open_entry(store, name, entry)
        room = opened.tensor_bytes * (1 if form == "safetensors" else 2)
        with (
            checkpoints_pull.new_files(Path(folder), room) as aside,
            bar(f"step {entry.step} of {name}", opened.bytes_to_read) as fetched,
        ):
            write(opened, aside, fetched)
            checkpoints_pull.write_about(opened, aside)
    out(folder)


@app.command(cls=TextCommand)
def rm(
    steps: Annotated[
        list[str], typer.Argument(metavar="STEP...", help="Steps shown by `gpuctl ckpt ls`, or files, or all.")
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
    files = snapshots_maintenance.objects(store, name) if _means_files(steps) else []
    if "files" in steps and not files:
        raise no_files(name)
    if not chosen and not files:
        say(f"job {name} has no checkpoint")
        return
    if files:
        snapshots_maintenance.check_over(store, name)
    what = _words(chosen, "the script's files" if files else "", name)
    frees = (deletion.freed(store, name, chosen) if chosen else 0) + sum(entry.size for entry in files)
    _ask(f"Delete {what}? That frees {size(frees)}.", yes)
    freed = deletion.remove(store, name, chosen) if chosen else 0
    freed += snapshots_maintenance.remove(store, name) if files else 0
    out(f"deleted {what}, which freed {size(freed)}")


@app.command(cls=TextCommand)
def verify(
    step: Annotated[
        str, typer.Argument(metavar="[STEP]", help="A step shown by `gpuctl ckpt ls`, or last, files or all.")
    ] = "all",
    job: Job = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Read a job's checkpoints again and check every byte.

    files are those that the script keeps in $GPUCTL_CHECKPOINT_DIR: the newest set of them, and the one before.
    """
    store, name = _job_with("checkpoints", job, cluster, bucket)
    chosen = _chosen(store, name, [step])
    kept = snapshots_maintenance.sets(store, name) if _means_files([step]) else ()
    if step == "files" and not kept:
        raise no_files(name)
    everything = verification.check(store, name, listing.committed(store, name)) if chosen else []
    paths = {entry.path for entry in chosen}
    looked_at = [one for one in everything if one.entry.path in paths]
    if not looked_at and not kept:
        say(f"job {name} has no checkpoint")
        return
    total = verification.bytes_to_verify(looked_at) + snapshots_maintenance.bytes_to_verify(kept)
    with bar(_words(looked_at, "files" if kept else "", name), total) as read:
        verified = verification.verify(store, name, looked_at, read) if looked_at else []
        files = snapshots_maintenance.verify(store, name, kept, read)
    for one in verified:
        say_damage(f"step {one.entry.step}", [fault.what for fault in one.faults])
    for entry in chosen:
        if all(one.entry.path != entry.path for one in verified):
            out(f"step {entry.step}: removed meanwhile")
    for one_set in kept:
        faults = next((one.faults for one in files if one.kept is one_set), None)
        which = "files" if one_set is kept[-1] else "files of the set before"
        if faults is None:
            out(f"{which}: removed meanwhile")
        else:
            say_damage(which, faults)
    _refuse_damaged(verified, everything, files)


@app.command(cls=TextCommand)
def gc(
    keep_last: Annotated[
        str | None,
        text_option("--keep-last", metavar="K", about="Keep the newest K (default: all; 3 with a rule below)."),
    ] = None,
    keep_every: Annotated[
        str | None, text_option("--keep-every", metavar="M", about="Also keep the first of each M steps.")
    ] = None,
    keep_best: Annotated[
        str | None,
        text_option(
            "--keep-best", metavar="METRIC[:min|max]", about="Also keep the one with the lowest or highest value."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
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
    found = deletion.garbage(store, name, retention)
    if not found.dropped and not found.left:
        say(f"job {name} has nothing to delete")
        return
    for entry in found.dropped:
        out(f"step {entry.step}: no rule keeps it")
    if found.left:
        out(f"{count(len(found.left), 'object')} that no checkpoint needs, left by past rounds")
    if dry_run:
        say(f"all this would free {size(found.frees)}; nothing was deleted")
        return
    _ask(f"Delete this? That frees {size(found.frees)}.", yes)
    out(f"freed {size(deletion.collect(store, name, found))}")


def _job(job: str | None, cluster: str | None, bucket: str | None) -> tuple[Store, str]:
    store = reach(cluster, bucket).store
    return store, queue.find(store, job).job


def _job_with(
    what: str, job: str | None, cluster: str | None, bucket: str | None, *, steps: bool = True, files: bool = True
) -> tuple[Store, str]:
    """The bucket, and the job that is named, or else the newest that has ``what`` there is to read: `gpuctl verify`
    runs jobs, too."""
    store = reach(cluster, bucket).store

    def has(name: str) -> bool:
        return bool((steps and listing.committed(store, name)) or (files and snapshot_log.newest(store, name)))

    found = queue.find_with(store, job, has).job
    if job is None and found != queue.newest(store):
        say(f"job {found}, the newest that has {what}")
    return store, found


def _chosen(store: Store, job: str, steps: Sequence[str]) -> list[CheckpointEntry]:
    if list(steps) == ["all"]:
        return list(listing.committed(store, job))
    found = {entry.path: entry for entry in (listing.find(store, job, step) for step in steps if step != "files")}
    return list(found.values())


def _means_files(steps: Sequence[str]) -> bool:
    return "files" in steps or list(steps) == ["all"]


def _words(chosen: Sequence[object], files: str, job: str) -> str:
    """The things that a verb is about, in words: "2 checkpoints and the script's files of digits-1"."""
    many = count(len(chosen), "checkpoint") if chosen else ""
    return f"{' and '.join(filter(None, (many, files)))} of {job}"


def _ask(question: str, yes: bool) -> None:
    if not yes and not confirm(question):
        raise GpuctlError("nothing was deleted", "answer y, or use -y")


def _retention(last: str | None, every: str | None, best: str | None) -> Retention | None:
    """The retention rules that flags give; ``None`` keeps all."""
    if last is None and every is None and best is None:
        return None
    metric, _, way = (best or "").partition(":")
    if way not in ("", "min", "max") or (best is not None and not metric):
        raise BadInput(f"--keep-best {best} is not a metric with a direction", "use one such as loss, or accuracy:max")
    return Retention(
        last=parse_flag("--keep-last", last, whole_number(1)) or Retention().last,
        every=parse_flag("--keep-every", every, whole_number(1)),
        best=metric or None,
        best_is="max" if way == "max" else "min",
    )


def _refuse_damaged(
    verified: Sequence[CheckpointCheck],
    everything: Sequence[CheckpointCheck],
    files: Sequence[snapshots_maintenance.SnapshotCheck],
) -> None:
    """Fail if any is damaged, and say what a restore takes then: those not read just now count by their sizes."""
    said, useless = [], []
    if damaged := [one.entry for one in verified if not one.whole]:
        known = {one.entry.path: one for one in [*everything, *verified]}
        restored = verification.restored(list(known.values()))
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
