"""Pulumi on the command line: the question whether it may be installed, and what is seen while it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuctl.cli.render.terminal import confirm, say, size
from gpuctl.stacks.catalog.instance_types import CloudName

if TYPE_CHECKING:
    from gpuctl.stacks.engine.errors import StackFailed
    from gpuctl.stacks.engine.pulumi_release import Release


def install_what_is_missing(provider: CloudName, *, yes: bool) -> None:
    """Pulumi's CLI, after a question that ``yes`` answers, and the provider's plug-in. Raises ``GpuctlError``."""
    from gpuctl.stacks.engine.pulumi_install import ensure_cli, ensure_plugin

    command = ensure_cli(lambda release, missing: yes or _agreed(release, missing), downloading)
    ensure_plugin(command, provider, downloading)


def _agreed(release: Release, missing: StackFailed) -> bool:
    from gpuctl.stacks.engine.errors import StackFailed
    from gpuctl.stacks.engine.pulumi_install import cli_folder

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        hint = f"add -y to have {release.what} installed in {cli_folder()}, or {missing.hint}"
        raise StackFailed(missing.kind, missing.message, hint)
    told = release.size()
    say(missing.message)
    how_much = "" if told is None else f" ({size(told)})"
    return confirm(f"Install {release.what} into {cli_folder()}{how_much}?")


@contextmanager
def downloading(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal; elsewhere a line at the beginning and one at the end (see ``OnDownload``)."""
    if not sys.stderr.isatty():
        with _lines(what, total) as take:
            yield take
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bytes_ = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *bytes_, console=Console(stderr=True, highlight=False)) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)


@contextmanager
def _lines(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    have = 0

    def take(done: int) -> None:
        nonlocal have
        have = done

    say(what if total is None else f"{what} ({size(total)})")
    began = time.monotonic()
    yield take
    say(f"{what}: {size(have) if have else 'done'} in {time.monotonic() - began:.0f} s")
