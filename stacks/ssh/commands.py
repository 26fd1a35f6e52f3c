"""Running something on a node: as a command that somebody else starts, over ssh or, for ``local``, right here.

A command is a value: it is made here and run by the verbs, which can show it, run many of them or hand it a terminal.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.ssh import tunnels
from gpuctl.stacks.ssh.config import control_path, name_of, program
from gpuctl.stacks.ssh.hosts import Host

NODE_FOLDER = "/var/lib/gpuctl/node"
"""The agent's, on machines that are reached over ssh."""
SESSION = "gpuctl"
"""The tmux session that ``gpuctl ssh --tmux`` attaches to."""
NO_TMUX = 97
"""Exit code of a command that wanted tmux where there is none."""
_SHARED_S = 60
"""Seconds that a connection stays open for the next command, which then takes no handshake."""
_SSH_FAILED = 255
_WAS_THERE = re.compile(r"Connection to \S+ closed by remote host|client_loop:|Timeout, server \S+ not responding")
"""How ssh says that a connection has ended, and not that there was none."""
_TROUBLE = re.compile(r"port \d+: (?P<what>[^\r\n]+)|resolve hostname [^\r\n:]+: (?P<name>[^\r\n]+)")


@dataclass(frozen=True, slots=True)
class Command:
    """A command for ``subprocess``. ``env`` is all of the environment; ``None``: that of this process."""

    argv: tuple[str, ...]
    cwd: Path | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)


class SshShell:
    """Runs commands over ssh. What ssh itself has to say goes into files, so that the other side's stderr is nothing
    but that; a person is told a line of it.

    Args:
        cluster: its name, with which the nodes' names in ssh's configuration begin.
        config: ssh's configuration file (see ``ssh.config``).
        logs: a folder for what ssh has to say, in a file for each node.
        way_in: whether some node has a public address.
    """

    def __init__(self, cluster: str, config: Path, logs: Path, *, way_in: bool) -> None:
        self._cluster = cluster
        self._config = config
        self._logs = logs
        self._way_in = way_in

    def ssh(self, host: Host, *options: str, shared: bool = True) -> tuple[str, ...]:
        """The beginning of a command line, up to and without the host."""
        log = str(self.log(host))
        return (program(), "-F", str(self._config), "-E", log, *self.options(host, shared=shared), *options)

    def options(self, host: Host, *, shared: bool = True) -> tuple[str, ...]:
        """Options of ssh and scp alike. What a tunnel's program has to say is kept apart, as ``-E`` does with what ssh
        has. ``shared``: through the connection that an earlier command has left open, if there is one; a tunnel is
        closed at once, because an Instance Connect Endpoint carries twenty at a time."""
        socket = control_path(self._cluster, host) if shared and not host.tunnel else None
        settings = [f"ControlPath={socket or 'none'}"]
        if socket:
            settings += ["ControlMaster=auto", f"ControlPersist={_SHARED_S}"]
        if host.tunnel:
            settings.append(f"ProxyCommand={tunnels.proxy_command(host.tunnel, self._tunnel_log(host))}")
        return tuple(word for setting in settings for word in ("-o", setting))

    def target(self, host: Host) -> str:
        if not host.address:
            raise GpuctlError(f"{host.node} has not reported its address yet", f"see `gpuctl logs --boot {host.node}`")
        if host.tunnel:
            tunnels.check_program(host.node, host.tunnel)
        return name_of(self._cluster, host)

    @property
    def config(self) -> Path:
        return self._config

    def log(self, host: Host) -> Path:
        return self._logs / host.node

    def run(self, host: Host, words: Sequence[str], *, terminal: bool = False) -> Command:
        """``words`` on the node: one is a line for its shell, several are a program and its arguments, none is a shell
        for a person. ``terminal``: it gets one of its own."""
        options = ["-t" if terminal else "-T"] if words else []
        return Command((*self.ssh(host, *options), self.target(host), *(["--", line_of(words)] if words else [])))

    def session(self, host: Host, words: Sequence[str]) -> Command:
        """Like ``run``, within a tmux session that goes on when the connection ends. Exits ``NO_TMUX`` without tmux."""
        return self.run(host, [_tmux(SESSION, words)], terminal=True)

    def python(self, host: Host, module: str, args: Sequence[str], *, terminal: bool = False) -> Command:
        """``python -m module FOLDER args`` with the node's own gpuctl; FOLDER is the agent's. Its standard input ends
        when the connection does. ``terminal``: it gets one of its own."""
        words = ("/opt/gpuctl/venv/bin/python", "-m", module, NODE_FOLDER, *args)
        return self.run(host, [as_root(f"exec {shlex.join(words)}")], terminal=terminal)

    def forward(self, host: Host, local: int, port: int) -> Command:
        """A command that forwards a port until it is ended: ``127.0.0.1:local`` here is ``localhost:port`` there. It
        has a connection of its own, which ends when the command does."""
        options = ("-N", "-T", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{local}:localhost:{port}")
        return Command((*self.ssh(host, *options, shared=False), self.target(host)))

    def said(self, host: Host) -> str:
        return _text_of(self.log(host))

    def trouble(self, host: Host, code: int, said: str = "") -> GpuctlError | None:
        """The reason why a command that ended with ``code`` never ran, if that is so. ``said``: what ssh had to say,
        where it is not in its log."""
        said, of_tunnel = said or self.said(host), _text_of(self._tunnel_log(host))
        if code != _SSH_FAILED or not said.strip():
            return None
        return explain(host, said, way_in=self._way_in, of_tunnel=of_tunnel)

    def forget(self, host: Host) -> None:
        """Forget what was said of connections to a node so far."""
        for log in (self.log(host), self._tunnel_log(host)):
            log.unlink(missing_ok=True)

    def _tunnel_log(self, host: Host) -> Path:
        return self._logs / f"{host.node}.tunnel"


class LocalShell:
    """Runs commands on provider ``local``: the node is a folder and an environment on this machine. ``places`` has
    both, by node."""

    def __init__(self, places: Mapping[str, tuple[Path, Mapping[str, str]]]) -> None:
        self._places = places

    def place(self, host: Host) -> tuple[Path, dict[str, str]]:
        """Raises ``GpuctlError`` if the node does not run on this machine."""
        if host.node not in self._places:
            running = ", ".join(self._places)
            hint = f"running here: {running}" if running else "none runs here; `gpuctl up` starts what has ended"
            raise GpuctlError(f"{host.node} does not run on this machine", hint)
        folder, env = self._places[host.node]
        return folder, {**os.environ, **env}

    def run(self, host: Host, words: Sequence[str], *, terminal: bool = False) -> Command:  # noqa: ARG002
        folder, env = self.place(host)
        shell = env.get("SHELL", "/bin/sh")
        argv = tuple(words) if len(words) > 1 else ("/bin/sh", "-c", words[0]) if words else (shell,)
        return Command(argv, folder, env)

    def session(self, host: Host, words: Sequence[str]) -> Command:
        name = f"{SESSION}-{host.node}"
        return self.run(host, [_tmux(name, words, server=name)])

    def python(self, host: Host, module: str, args: Sequence[str], *, terminal: bool = False) -> Command:  # noqa: ARG002
        folder, env = self.place(host)
        return Command((sys.executable, "-m", module, str(folder), *args), folder, env)

    def trouble(self, host: Host, code: int) -> GpuctlError | None:  # noqa: ARG002
        return None


def line_of(words: Sequence[str]) -> str:
    """
    >>> line_of(["cd /tmp && ls"]), line_of(["echo", "two words"])
    ('cd /tmp && ls', "echo 'two words'")
    """
    return words[0] if len(words) == 1 else shlex.join(words)


def as_root(script: str) -> str:
    """A line for the shell of somebody who is root, or may be by ``sudo`` without a password."""
    inner = shlex.quote(script)
    return f'if [ "$(id -u)" = 0 ]; then exec sh -c {inner}; else exec sudo -n sh -c {inner}; fi'


def explain(host: Host, said: str, *, way_in: bool, of_tunnel: str = "") -> GpuctlError:
    """The error for a connection that ssh could not make or keep, in one line.

    Args:
        host: the node to be reached.
        said: what ssh wrote.
        way_in: whether some node has a public address.
        of_tunnel: what the tunnel's program wrote; empty: nothing, or there is no tunnel.
    """
    node = host.node
    if "HOST IDENTIFICATION HAS CHANGED" in said:
        return GpuctlError(
            f"{node} presents a different host key than the one in the bucket, so it was refused",
            "the connection may be intercepted, or the machine was reinstalled: find out which",
        )
    if "host key is known" in said or "Host key verification failed" in said:
        if host.host_keys:
            return GpuctlError(
                f"{node} presents a host key of another type than those in the bucket, so it was refused",
                "the machine may have been reinstalled: find out",
            )
        return GpuctlError(
            f"the bucket has no host key of {node}, so it was refused", f"see `gpuctl logs --boot {node}`"
        )
    if "Permission denied" in said:
        who = f"{host.user} on {node}" if host.user else node
        return GpuctlError(
            f"{who} accepts none of the keys that ssh offers", "add the cluster's with `ssh-add`, or see `ssh-add -l`"
        )
    if host.tunnel and _WAS_THERE.search(said):
        return GpuctlError(
            f"the connection to {node} was closed; connections through a tunnel last an hour at most",
            "run it again; sessions of `gpuctl ssh --tmux` keep running",
        )
    if host.tunnel:
        return tunnels.explain(node, of_tunnel or said)
    if found := _TROUBLE.search(said):
        inside = "" if host.is_public or way_in else ", and no node of this cluster has a public address"
        what = (found["what"] or found["name"]).strip()
        at = "" if host.address == node else f" at {host.address}"
        return GpuctlError(f"cannot reach {node}{at}: {what}{inside}", "see `gpuctl status`")
    return GpuctlError(f"cannot reach {node}: {said.strip().splitlines()[-1].strip()}", "see `gpuctl status`")


def _text_of(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def _tmux(session: str, words: Sequence[str], *, server: str = "") -> str:
    tmux = ["tmux", *(["-L", server] if server else []), "new-session", "-A", "-s", session]
    wanted = [*tmux, *([line_of(words)] if words else [])]
    return f"command -v tmux >/dev/null || exit {NO_TMUX}; exec {shlex.join(wanted)}"
