"""The working folder on its way to the nodes."""

from __future__ import annotations

from pathlib import Path

from gpuctl.cli.render.terminal import bar, count, say, size
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import code_archive, code_survey
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.stacks.state.paths import state_dir

_NAMED = 5
"""Of a list, in a line."""


def send_folder(store: Bucket, folder: Path, script: str) -> str:
    """Pack ``folder`` and send it unless the bucket has it; returns its digest. ``script``: what is to run in it, which
    may be a program of the nodes' instead."""
    found = code_survey.look_over(folder, apart=state_dir().resolve())
    is_here = (folder / script).is_file() and not Path(script).is_absolute()
    if is_here and script not in {item.name for item in found.items}:
        raise BadInput(f"{script} is excluded by .gitignore, so the nodes would not get it", "change .gitignore")
    if found.private:
        names = ", ".join(found.private[:_NAMED]) + (" …" if len(found.private) > _NAMED else "")
        say(f"not uploaded, as they may hold secrets: {names} (to send one: a line !NAME in .gpuctlignore)")
    with code_archive.packed(found.items) as code:
        what = f"code ({count(code.files, 'file')})"
        if code_archive.is_there(store, code.digest):
            say(f"{what}: {size(code.bytes)}, already there")
        else:
            with bar(what, code.bytes) as sent:
                code_archive.upload(store, code, sent)
        return code.digest
