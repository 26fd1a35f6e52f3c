"""The clusters this user has made, noted below the user's state directory: name, provider, and where the bucket is.

Only a convenience: everything about a cluster but these few facts is in its bucket.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.errors import BadInput, CorruptRecord
from gpuctl.cluster.records.codec import decode
from gpuctl.stacks.state.paths import make_state_dir, ssh_dir, state_dir


class KnownCluster(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cluster known on this machine, ``<state>/clusters/<name>.json``."""

    name: str
    provider: str
    bucket: str
    """URL of the cluster's own prefix."""
    id: str = ""
    """The cluster's identity, as in its record (see ``ClusterSpec.id``): by it this user is no stranger to it."""
    hosts: tuple[str, ...] = ()
    """Only of provider ssh: the machines, as ``--hosts`` named them last."""
    created_at: float = 0.0
    region: str = ""
    """Of a rented cluster, as is ``account``."""
    account: str = ""


def command(verb: str, cluster: str) -> str:
    """The command line of a verb for a cluster, as texts for a person name it: ``gpuctl down --cluster big``."""
    return f"gpuctl {verb}" if cluster == "default" else f"gpuctl {verb} --cluster {cluster}"


def remember(cluster: KnownCluster) -> None:
    folder = make_state_dir() / "clusters"
    folder.mkdir(exist_ok=True, mode=0o700)
    path = folder / f"{cluster.name}.json"
    write_atomic(path, msgspec.json.encode(cluster), mode=0o600, durable=True)


def forget(name: str) -> None:
    """Forget a cluster, with its entries in the user's ssh configuration."""
    for kind in ("conf", "config", "known_hosts"):
        (ssh_dir() / f"{name}.{kind}").unlink(missing_ok=True)
    (state_dir() / "clusters" / f"{name}.json").unlink(missing_ok=True)


def known_clusters(on_unreadable: Callable[[str], object] = lambda _: None) -> list[KnownCluster]:
    """Known clusters by name. One that cannot be read hides no other: ``on_unreadable`` hears of it."""
    found = []
    for path in sorted((state_dir() / "clusters").glob("*.json")):
        try:
            found.append(decode(path.read_bytes(), KnownCluster, str(path)))
        except CorruptRecord as error:
            on_unreadable(str(error))
    return found


def get(name: str) -> KnownCluster | None:
    """``None`` if there is none of that name. Raises ``CorruptRecord`` (see ``last_request.recalled``)."""
    path = state_dir() / "clusters" / f"{name}.json"
    try:
        return decode(path.read_bytes(), KnownCluster, str(path))
    except FileNotFoundError:
        return None


def find(name: str) -> KnownCluster:
    """Raises ``BadInput`` if there is none of that name."""
    found = get(name)
    if found is None:
        others = ", ".join(c.name for c in known_clusters())
        hint = f"there are: {others} (choose with --cluster)" if others else f"create one with `{command('up', name)}`"
        raise BadInput(f"no cluster named {name!r}", hint)
    return found
