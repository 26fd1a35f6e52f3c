"""The folders where gpuctl keeps what it notes on a user's machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpuctl.cluster.errors import BadInput


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """``$GPUCTL_STATE_DIR``, else ``$XDG_STATE_HOME/gpuctl``, else ``~/.local/state/gpuctl``.

    Raises ``BadInput`` for a relative one.
    """
    if given := env.get("GPUCTL_STATE_DIR"):
        if not Path(given).is_absolute():
            raise BadInput(f"GPUCTL_STATE_DIR={given} is a relative path", "use an absolute one")
        return Path(given)
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gpuctl"


def ssh_dir() -> Path:
    """The folder with clusters' files for ssh (see ``ssh.config``): each is called ``<cluster>.<kind>``."""
    return state_dir() / "ssh"


def make_state_dir() -> Path:
    """The state directory: for this user alone if it is new."""
    folder = state_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def private_folder(folder: Path) -> Path:
    """Create a folder for this user alone, and so is all that is above it up to the state directory."""
    make_state_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for one in (folder, *folder.parents):
        if one == state_dir():
            break
        one.chmod(0o700)
    return folder
