"""The choice of a region: one rule for every verb that asks a cloud something.

A flag, the setting ``region`` (``GPUCTL_REGION``, ``gpuctl.yaml``), the region that the cluster is in, the cloud's own
environment and profile (``AWS_REGION``, ``~/.aws/config`` …), the region that was used last, and only then the usual
one of the catalog. Which of them won is told.

Every region that something was made in is noted before it is made, so that ``leaks`` looks there too.

::

    <state>/regions.json    provider -> regions, the last used first
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.state.paths import make_state_dir, state_dir

USUAL = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}
"""The region whose prices the catalog surely has."""


class Region(NamedTuple):
    """A region, and what named it, for people: ``--region``, ``AWS_REGION``, ``last used``, …"""

    name: str
    source: str


def choose(provider: CloudName, named: Region | None = None, of_cluster: str = "") -> Region:
    """``named``: by a flag or a setting; ``of_cluster``: where the cluster is already."""
    if named is not None:
        return named
    if of_cluster:
        return Region(of_cluster, "where the cluster is")
    name, source = cloud(provider).usual_region()
    if name:
        return Region(name, source)
    if last := used(provider):
        return Region(last[0], "last used")
    return Region(USUAL[provider], "the default")


def to_search(provider: CloudName, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Regions to look into for what was left: those that are named; else every one that was ever used from here, and
    the one that ``choose`` gives."""
    if named:
        return tuple(dict.fromkeys(named))
    return tuple(dict.fromkeys([*used(provider), choose(provider).name]))


def used(provider: CloudName) -> list[str]:
    """The last used first. Raises ``BadInput`` if the file cannot be read."""
    return _read().get(provider, [])


def note_used(provider: CloudName, region: str) -> None:
    """Remember the regions in use, before anything is created there."""
    all_used = _read()
    all_used[provider] = list(dict.fromkeys([region, *all_used.get(provider, [])]))
    make_state_dir()
    write_atomic(_path(), msgspec.json.encode(all_used), mode=0o600, durable=True)


def _read() -> dict[str, list[str]]:
    path = _path()
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]]) if path.exists() else {}
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(
            f"{path} cannot be read: {error}", "delete it; `gpuctl leaks --all-regions` looks everywhere"
        ) from error


def _path() -> Path:
    return state_dir() / "regions.json"
