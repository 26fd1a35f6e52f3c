"""What Pulumi's states are sealed with: one passphrase for all of them, which only this user can read. Where others
share them, one that they agree on."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.known import make_state_dir, state_dir


def passphrase(backend: str = "") -> str:
    """Made when it is first asked for; the states cannot be read without it. Where a ``backend`` is named,
    ``PULUMI_CONFIG_PASSPHRASE`` goes before. Raises ``GpuctlError`` if the file has been emptied: another one would
    lock the user out of every state there is."""
    if backend and (agreed := os.environ.get("PULUMI_CONFIG_PASSPHRASE")):
        return agreed
    folder = private_folder(state_dir() / "pulumi")
    path = folder / ".passphrase"
    if not path.exists():
        partial = folder / f".passphrase-{secrets.token_hex(8)}"
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        # A link, for it appears whole, and the first of two who do this at once wins.
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        partial.unlink()
    told = path.read_text().strip()
    if not told:
        raise GpuctlError(f"{path} is empty, and Pulumi's state cannot be read without it", "restore it from a backup")
    return told


def private_folder(folder: Path) -> Path:
    """For this user alone, and so is all that is above it up to the state directory."""
    make_state_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for one in (folder, *folder.parents):
        if one == state_dir():
            break
        one.chmod(0o700)
    return folder
