"""What the user's ssh is told of a cluster, so that plain ``ssh NAME-0``, rsync and editors find its nodes.

::

    <state>/ssh/<cluster>.conf           its nodes; made anew whenever a verb of gpuctl uses ssh, gone with ``down``
    <state>/ssh/<cluster>.known_hosts    their host keys, as the bucket has them
    <state>/ssh/<cluster>.config         what gpuctl's own ssh reads: the above, then the user's own configuration
    ~/.ssh/config                        one ``Include`` line at its top, if the user wants it (``install``)

A host key is never learnt by looking: one that is not pinned is refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.hosts import Host
from gpuctl.stacks.known import state_dir

_ALWAYS = (
    "GlobalKnownHostsFile /dev/null",
    "StrictHostKeyChecking yes",
    "UpdateHostKeys no",
    "CheckHostIP no",
    "ConnectTimeout 10",
    "ServerAliveInterval 15",
    "ServerAliveCountMax 4",
)


def name_of(cluster: str, host: Host) -> str:
    """What ssh calls it, whichever place it has in line now."""
    return f"{cluster}-{host.node}"


def render(cluster: str, hosts: Sequence[Host], known_hosts: Path) -> str:
    """One block a node, under ``NAME-<index>`` and ``NAME-<node>``. Nodes that cannot be reached from outside are
    reached through the first in line that can."""
    way_in = next((host for host in hosts if host.is_public and host.takes_part), None)
    blocks = [f"# Nodes of {cluster}, by gpuctl, which writes this file anew whenever it uses ssh.\n"]
    for host in hosts:
        if not host.address:
            continue
        jump = host.jump or ("" if host.is_public or way_in is None else name_of(cluster, way_in))
        lines = [
            f"HostName {host.address}",
            f"Port {host.port}",
            *([f"User {host.user}"] if host.user else []),
            *(f'IdentityFile "{file}"' for file in host.identities),
            *([f"ProxyJump {jump}"] if jump else []),
            f"HostKeyAlias {_alias(cluster, host)}",
            f'UserKnownHostsFile "{known_hosts}"',
            *_ALWAYS,
        ]
        names = dict.fromkeys((f"{cluster}-{host.index}", name_of(cluster, host)))
        blocks.append(f"Host {' '.join(names)}\n" + "".join(f"    {line}\n" for line in lines))
    return "\n".join(blocks)


def write(cluster: str, hosts: Sequence[Host]) -> Path:
    """Make the cluster's files; returns the configuration that gpuctl's own ssh reads."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    known_hosts = folder / f"{cluster}.known_hosts"
    pins = [f"{_alias(cluster, host)} {key}\n" for host in hosts for key in host.host_keys]
    _replace(known_hosts, "".join(pins))
    _replace(folder / f"{cluster}.conf", render(cluster, hosts, known_hosts))
    others = [f'Include "{path}"' for path in (_users_config(), Path("/etc/ssh/ssh_config")) if path.exists()]
    ours = [f'Include "{folder}/{cluster}.conf"', f'Include "{folder}/*.conf"']
    config = folder / f"{cluster}.config"
    _replace(config, "\n".join([*ours, *others, ""]))
    return config


def remove(cluster: str) -> None:
    for kind in ("conf", "config", "known_hosts"):
        (_folder() / f"{cluster}.{kind}").unlink(missing_ok=True)


def install() -> tuple[Path, bool]:
    """Have plain ssh read the clusters' files: an ``Include`` at the top of the user's configuration, where no ``Host``
    block can catch it. Returns that file, and whether the line is new. Raises ``BadInput`` if it cannot be written."""
    path = _users_config()
    line = f'Include "{_folder()}/*.conf"'
    try:
        target = path.resolve()  # of a link into a folder of dotfiles
        text = target.read_text() if target.exists() else ""
        if line in text.splitlines():
            return path, False
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        _replace(target, f"# Nodes of gpuctl's clusters.\n{line}\n" + (f"\n{text}" if text else ""), mode)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot add a line to {path}: {error}", f"put this at its top yourself: {line}") from error
    return path, True


def _alias(cluster: str, host: Host) -> str:
    return f"gpuctl-{cluster}-{host.node}"


def _folder() -> Path:
    return state_dir() / "ssh"


def _users_config() -> Path:
    return Path.home() / ".ssh" / "config"


def _replace(path: Path, text: str, mode: int = 0o600) -> None:
    """At once or not at all, with nobody seeing half of it. One that says the same already is left alone."""
    if path.exists() and path.read_text() == text:
        return
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
