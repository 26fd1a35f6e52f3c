"""The clusters this user has made, noted below the user's state directory: name, provider, and where the bucket is.

Only a convenience: everything about a cluster but these three facts is in its bucket.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records import decode


class KnownCluster(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``<state>/clusters/<name>.json``"""

    name: str
    provider: str
    bucket: str
    """URL of the cluster's own prefix."""
    created_at: float = 0.0


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """``$GPUCTL_STATE_DIR``, else ``$XDG_STATE_HOME/gpuctl``, else ``~/.local/state/gpuctl``."""
    if env.get("GPUCTL_STATE_DIR"):
        return Path(env["GPUCTL_STATE_DIR"]).absolute()
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gpuctl"


def make_state_dir() -> Path:
    """The state directory: for this user alone if it is new."""
    folder = state_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def remember(cluster: KnownCluster) -> None:
    folder = make_state_dir() / "clusters"
    folder.mkdir(exist_ok=True, mode=0o700)
    path = folder / f"{cluster.name}.json"
    write_private(path, msgspec.json.encode(cluster))


def write_private(path: Path, data: bytes) -> None:
    """Whole or not at all, and for this user alone from its first byte on."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


def forget(name: str) -> None:
    from gpuctl.stacks import ssh_config  # which needs this module

    ssh_config.remove(name)
    (state_dir() / "clusters" / f"{name}.json").unlink(missing_ok=True)


def known_clusters() -> list[KnownCluster]:
    """By name."""
    files = sorted((state_dir() / "clusters").glob("*.json"))
    return [decode(path.read_bytes(), KnownCluster, str(path)) for path in files]


def get(name: str) -> KnownCluster | None:
    """``None`` if there is none of that name."""
    path = state_dir() / "clusters" / f"{name}.json"
    return decode(path.read_bytes(), KnownCluster, str(path)) if path.exists() else None


def find(name: str) -> KnownCluster:
    """Raises ``BadInput`` if there is none of that name."""
    found = get(name)
    if found is None:
        others = ", ".join(c.name for c in known_clusters())
        hint = f"there are: {others} (choose with --cluster)" if others else "make one with `gpuctl up`"
        raise BadInput(f"there is no cluster named {name!r}", hint)
    return found
