"""The configuration of a cluster for the user's ssh, so that plain ``ssh NAME-0``, rsync and editors find its nodes.

::

    <state>/ssh/<cluster>.conf           its nodes; made anew whenever a verb of gpuctl uses ssh, gone with ``down``
    <state>/ssh/<cluster>.known_hosts    their host keys, as the bucket has them
    <state>/ssh/<cluster>.config         what gpuctl's own ssh reads: the above, then the user's own configuration
    <state>/ssh/<hash>                   socket of a connection that gpuctl's commands share (``control_path``)
    ~/.ssh/config                        one ``Include`` line at its top, if the user wants it (``install``)

A host key is never learnt by looking: one that is not pinned is refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.errors import BadInput, CorruptRecord, GpuctlError
from gpuctl.stacks.request import last_request
from gpuctl.stacks.ssh import tunnels
from gpuctl.stacks.ssh.hosts import Host, is_name
from gpuctl.stacks.state.paths import ssh_dir

_TUNNEL_TIMEOUT = "ConnectTimeout 30"
"""The tunnel's program asks its cloud twice before it opens one."""
_SOCKET_BYTES = 104 - 18
"""Longest path of a shared connection: a socket's on macOS, less the random suffix that ssh adds while it makes one."""
_ALWAYS = (
    "GlobalKnownHostsFile /dev/null",
    "StrictHostKeyChecking yes",
    "UpdateHostKeys no",
    "CheckHostIP no",
    "ConnectTimeout 10",
    "ServerAliveInterval 15",
    "ServerAliveCountMax 4",
)


def program() -> str:
    """ssh itself. Raises ``GpuctlError`` if it is not on PATH."""
    if shutil.which("ssh") is None:
        raise GpuctlError(
            "`ssh` is not installed on this machine", "install OpenSSH's client: apt-get install openssh-client"
        )
    return "ssh"


def name_of(cluster: str, host: Host) -> str:
    """The name of a node in ssh's configuration, whichever place it has in line now."""
    return f"{cluster}-{host.node}"


def render(cluster: str, hosts: Sequence[Host], known_hosts: Path) -> str:
    """One block a node, under ``NAME-<index>`` and ``NAME-<node>``. Nodes that cannot be reached from outside are
    reached through their tunnel, else through the first in line that can."""
    way_in = next((host for host in hosts if host.is_public and host.takes_part), None)
    blocks = [f"# Nodes of {cluster}, by gpuctl, which writes this file anew whenever it uses ssh.\n"]
    for host in hosts:
        if not host.address:
            continue
        needs_way_in = not (host.is_public or host.tunnel)
        jump = host.jump or (name_of(cluster, way_in) if needs_way_in and way_in else "")
        lines = [
            f"HostName {host.address}",
            f"Port {host.port}",
            *([f"User {host.user}"] if host.user else []),
            *(f'IdentityFile "{file}"' for file in host.identities),
            *([f"ProxyJump {jump}"] if jump else []),
            *([f"ProxyCommand {tunnels.proxy_command(host.tunnel)}", _TUNNEL_TIMEOUT] if host.tunnel else []),
            f"HostKeyAlias {_alias(cluster, host)}",
            f'UserKnownHostsFile "{known_hosts}"',
            *_ALWAYS,
        ]
        names = dict.fromkeys((f"{cluster}-{host.index}", name_of(cluster, host)))
        blocks.append(f"Host {' '.join(names)}\n" + "".join(f"    {line}\n" for line in lines))
    return "\n".join(blocks)


def write(cluster: str, hosts: Sequence[Host]) -> Path:
    """Make the cluster's files; returns the configuration that gpuctl's own ssh reads. Raises ``BadInput`` if the
    cluster is called what may be no part of a path or of a setting: its name comes from the bucket too."""
    if not is_name(cluster):
        raise BadInput(
            f"the cluster's record in the bucket calls it {cluster!r}, which is not a valid name", "see who wrote it"
        )
    folder = ssh_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    hosts = _with_identity(cluster, hosts)
    known_hosts = folder / f"{cluster}.known_hosts"
    pins = [f"{_alias(cluster, host)} {key}\n" for host in hosts for key in host.host_keys]
    _replace(known_hosts, "".join(pins))
    _replace(folder / f"{cluster}.conf", render(cluster, hosts, known_hosts))
    others = [f'Include "{path}"' for path in (_users_config(), Path("/etc/ssh/ssh_config")) if path.exists()]
    ours = [f'Include "{folder}/{cluster}.conf"', f'Include "{folder}/*.conf"']
    config = folder / f"{cluster}.config"
    _replace(config, "\n".join([*ours, *others, ""]))
    return config


def _with_identity(cluster: str, hosts: Sequence[Host]) -> Sequence[Host]:
    """Rented ones with the key that they were made with."""
    try:
        last = last_request.find(cluster)
    except CorruptRecord:
        last = None
    if last is None or not last.terms.identity:
        return hosts
    return [replace(host, identities=host.identities or (last.terms.identity,)) for host in hosts]


def control_path(cluster: str, host: Host) -> Path | None:
    """Socket of the connection that commands on a node share, once ``write`` has made the files. Another address, way
    or pinned key is another connection: one that is open has been checked against what is written here now.

    ``None``: nothing is shared, because a socket's path may not be as long.
    """
    folder = ssh_dir()
    checked = b"".join((folder / f"{cluster}.{suffix}").read_bytes() for suffix in ("conf", "known_hosts"))
    path = folder / hashlib.sha256(checked + name_of(cluster, host).encode()).hexdigest()[:16]
    return path if len(os.fsencode(path)) <= _SOCKET_BYTES else None


def install() -> tuple[Path, bool]:
    """Have plain ssh read the clusters' files: an ``Include`` at the top of the user's configuration, where no ``Host``
    block can catch it. Returns that file, and whether the line is new. Raises ``BadInput`` if it cannot be written."""
    path = _users_config()
    line = f'Include "{ssh_dir()}/*.conf"'
    try:
        target = path.resolve()  # of a link into a folder of dotfiles
        text = target.read_text() if target.exists() else ""
        if line in text.splitlines():
            return path, False
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        _replace(target, f"# Nodes of gpuctl's clusters.\n{line}\n" + (f"\n{text}" if text else ""), mode)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot add a line to {path}: {error}", f"add this line at its top yourself: {line}") from error
    return path, True


def _alias(cluster: str, host: Host) -> str:
    return f"gpuctl-{cluster}-{host.node}"


def _users_config() -> Path:
    return Path.home() / ".ssh" / "config"


def _replace(path: Path, text: str, mode: int = 0o600) -> None:
    """One that says the same already is left alone."""
    if path.exists() and path.read_text() == text:
        return
    write_atomic(path, text.encode(), mode=mode, durable=True)
