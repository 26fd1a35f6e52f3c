"""A person at a terminal, as the other side of what a provider does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuctl.cli.render.terminal import confirm, out, say, table
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.providers.interface import Dialog

if TYPE_CHECKING:
    from gpuctl.stacks.clouds.answers import Leftover, Scan
    from gpuctl.stacks.engine.events import OnProgress


class TerminalDialog(Dialog):
    """Progress goes to standard error; ``yes`` answers all questions."""

    def __init__(self, *, yes: bool = False) -> None:
        super().__init__(say)
        self._yes = yes

    def confirm(self, question: str) -> None:
        if self._yes:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise BadInput("this costs money and needs confirmation, but there is no terminal", "add -y to confirm")
        if not confirm(question):
            raise GpuctlError("nothing was rented", "answer y, or use -y")

    def confirm_removal(self, found: Scan) -> None:
        header = ("CLUSTER", "ID OF CLUSTER", "OWNER", "KIND", "ID", "REGION", "$/H")
        for line in table(header, [_row(one) for one in found.found], give=[4, 2]):
            out(line)
        say(f"total: {found.summary()}")
        if not self._yes and not confirm("Delete all of it? Machines stop at once, with all they run."):
            raise BadInput("nothing was deleted", "answer y, or use -y")

    @contextmanager
    def progress(self) -> Iterator[OnProgress]:
        from gpuctl.cli.render.resource_progress import shown_progress

        with shown_progress() as on_progress:
            yield on_progress


def _row(one: Leftover) -> list[str]:
    usd = "-" if one.usd_per_hour is None else f"{one.usd_per_hour:.4g}"
    return [one.cluster, one.cluster_id or "-", one.owner or "-", one.kind, one.id, one.region or "-", usd]
