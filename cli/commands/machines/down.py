"""``gpuctl down``: removes the cluster, and keeps the checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from gpuctl.cli.commands.machines.kept_checkpoints import delete_checkpoints_of, tell_what_remains
from gpuctl.cli.render.dialog import TerminalDialog
from gpuctl.cli.render.terminal import can_ask, confirm, count, out, say
from gpuctl.cli.settings.options import Cluster, text_option
from gpuctl.cli.settings.resolve import load
from gpuctl.cli.signals import as_interrupts
from gpuctl.cluster.errors import BadInput, CorruptRecord, GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.cluster.views import job_status
from gpuctl.cluster.views.holders import described, live_nodes, read_past, read_record
from gpuctl.stacks.catalog.instance_types import CLOUDS
from gpuctl.stacks.providers.interface import provider as provider_named
from gpuctl.stacks.providers.ownership import is_me
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster, command

_DRAIN_S = 120.0
"""Seconds that jobs get for a last checkpoint."""
_LIVES_S = 15.0
"""Seconds since the heartbeat of a node that may still see to its jobs."""
_UNREADABLE = "a record that cannot be read"
"""What the bucket holds; it was this cluster's when it was noted here."""


def verb(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Clear another machine's lock; drop unreachable ssh machines.")
    ] = False,
    delete_checkpoints: Annotated[
        str | None,
        text_option(
            "--delete-checkpoints", metavar="CLUSTER", about="Also delete the checkpoints; repeat the cluster's name."
        ),
    ] = None,
    by_tag: Annotated[
        str | None,
        text_option("--by-tag", metavar="NAME|ID", about="Remove everything tagged with a cluster not known here."),
    ] = None,
    provider: Annotated[
        str | None, text_option("--provider", metavar="NAME", about="With --by-tag: aws, gcp or azure.")
    ] = None,
    region: Annotated[
        list[str] | None,
        text_option("--region", metavar="NAME", about="With --by-tag: where to look, or all; may be repeated."),
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Remove the cluster; keep the checkpoints.

    Jobs that are not over end as cancelled, after a last checkpoint. Fails if a machine or anything else is left, and
    names it.
    """
    if by_tag is not None:
        given = {"--cluster": cluster, "--delete-checkpoints": delete_checkpoints, "--force": force or None}
        if refused := [flag for flag, value in given.items() if value is not None]:
            raise BadInput(f"{refused[0]} does not go with --by-tag", "leave it out; for buckets: gpuctl buckets rm")
        from gpuctl.cli.session.down_by_tag import remove_by_tag

        remove_by_tag(by_tag, provider, region or [], yes=yes)
        return
    if provider or region:
        raise BadInput("--provider and --region go with --by-tag", "add --by-tag NAME, or leave them out")
    there = _known(load({"cluster": cluster}, only=("cluster",)).cluster)
    if delete_checkpoints not in (None, there.name):
        raise BadInput(
            f"--delete-checkpoints {delete_checkpoints} does not match cluster {there.name}", "repeat its name"
        )
    store = _opened(there)
    whose = _stranger(there, store)
    if whose and delete_checkpoints:
        raise BadInput(f"{shown(there.bucket)} holds {whose}", "leave --delete-checkpoints out")
    if whose not in ("", _UNREADABLE):
        say(f"the bucket {shown(there.bucket)} holds {whose}: nothing in it is changed")
        if there.provider == "ssh":  # what was there of this one, that one has taken over with its machines
            clusters.forget(there.name)
            out(f"cluster {there.name} is no longer known here")
            return
        store = None
    provides = provider_named(there.provider, TerminalDialog(yes=yes))
    provides.check_down(there)
    is_own = provides.has_own_bucket(there)
    waiting = _unfinished(store)
    if waiting and not yes:
        _agree_to_cancel(waiting)
    with as_interrupts():
        try:
            _drain(there, store, waiting)
        except KeyboardInterrupt:
            on = command("down", there.name)
            say(f"interrupted: nothing of {there.name} has been removed yet; `{on}` goes on")
            raise
        left = provides.down(there, force=force)
    if left:
        for thing in left:
            out(f"left: {thing}")
        raise GpuctlError(f"{count(len(left), 'thing')} could not be removed", provides.retry_hint(there))
    out(f"cluster {there.name} is down")
    if delete_checkpoints:
        delete_checkpoints_of(provides, there, store, is_own)
    elif store is not None:
        tell_what_remains(store)


def _known(name: str) -> KnownCluster:
    elsewhere = f"gpuctl down --by-tag {name} --provider {'|'.join(CLOUDS)}"
    try:
        found = last_request.recalled(name)
    except CorruptRecord as error:
        raise BadInput(error.message, f"remove it by its tags: {elsewhere}") from error
    if found is not None:
        return found
    try:
        return clusters.find(name)
    except BadInput as error:
        raise BadInput(error.message, f"{error.hint}; if it was made on another machine: {elsewhere}") from error


def _agree_to_cancel(waiting: list[str]) -> None:
    """Raises ``GpuctlError`` if the user does not, ``BadInput`` if there is nobody to ask."""
    if not can_ask():
        raise BadInput(f"{', '.join(waiting)} would be cancelled, and there is no terminal to confirm it", "add -y")
    if not confirm(f"{', '.join(waiting)} will be cancelled. Continue?"):
        raise GpuctlError("nothing was changed", "let the jobs end first, or answer y")


def _stranger(there: KnownCluster, store: Bucket | None) -> str:
    """A line about the cluster in the bucket, if it is not this one: an `up` that was refused may have noted that
    bucket."""
    if store is None:
        return ""
    try:
        record = read_record(store)
        past = None if record else read_past(store)
    except CorruptRecord:
        return _UNREADABLE
    except GpuctlError:  # not to be had: what is missing keeps nothing from going
        return ""
    if past is not None and past.id != there.id and not is_me(past.owner):
        return described(past)
    if record is None or (record.id, record.name) == (there.id, there.name):
        return ""
    try:
        live = live_nodes(store)
    except GpuctlError:  # whose it is, is known all the same
        live = 0
    return described(record, live)


def _opened(there: KnownCluster) -> Bucket | None:
    """``None``: there is no bucket any more, or it does not open. That keeps nothing from going."""
    parts = urlsplit(there.bucket)
    if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
        say(f"the bucket {shown(there.bucket)} is gone; going on without it")
        return None
    try:
        return open_bucket(there.bucket)
    except GpuctlError as error:
        say(f"going on without the bucket: {error.message}")
        return None


def _unfinished(store: Bucket | None) -> list[str]:
    if store is None:
        return []
    try:
        return job_status.unfinished(store)
    except GpuctlError as error:
        say(f"jobs cannot be cancelled: {error.message}")
        return []


def _drain(there: KnownCluster, store: Bucket | None, waiting: list[str]) -> None:
    """Every job ends by itself, if there is a node that can see to it, and by our word if there is none."""
    if store is None or not waiting:
        return
    try:
        _ask_and_wait(there, store, waiting)
    except GpuctlError as error:
        say(f"the jobs are not waited for: {error.message}")
    try:
        for job in waiting:
            queue.end_as_cancelled(store, job, "the cluster was taken down")
            ended = queue.outcome(store, job)
            say(f"job {job} {ended.result if ended else 'cancelled'}")
    except GpuctlError as error:
        say(f"not all jobs could be cancelled: {error.message}")


def _ask_and_wait(there: KnownCluster, store: Bucket, waiting: list[str]) -> None:
    for job in waiting:
        queue.ask_to_cancel(store, job)
    until = time.monotonic() + _DRAIN_S
    told = False
    while time.monotonic() < until and _somebody_lives(store):
        left = [job for job in waiting if not queue.outcome(store, job)]
        if not left:
            break
        if not told:
            say(f"waiting for {', '.join(left)} to end after a last checkpoint, {_DRAIN_S:.0f} s at most")
            say(f"  at once, from another terminal: {command(f'cancel --now {left[0]}', there.name)}")
            told = True
        time.sleep(queue.poll_s(store))


def _somebody_lives(store: Bucket) -> bool:
    """By the heartbeats alone: the cluster's record may be gone."""
    return any(time.time() - beat.seen_at < _LIVES_S for beat in job_status.read_heartbeats(store))
