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
from typing import Protocol

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.hosts import Host
from gpuctl.stacks.ssh_config import name_of

SESSION = "gpuctl"
"""The tmux session that ``gpuctl ssh --tmux`` attaches to."""
NO_TMUX = 97
"""Exit code of a command that wanted tmux where there is none."""
_SSH_FAILED = 255
_TROUBLE = re.compile(r"port \d+: (?P<what>[^\r\n]+)|resolve hostname [^\r\n:]+: (?P<name>[^\r\n]+)")


@dataclass(frozen=True, slots=True)
class Command:
    """What ``subprocess`` takes. ``env`` is all of the environment; ``None``: that of this process."""

    argv: tuple[str, ...]
    cwd: Path | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)


class Shell(Protocol):
    """How things run on the nodes of one cluster."""

    def run(self, host: Host, words: Sequence[str], *, terminal: bool = False) -> Command:
        """``words`` on the node: one is a line for its shell, several are a program and its arguments, none is a shell
        for a person. ``terminal``: it gets one of its own."""
        ...

    def session(self, host: Host, words: Sequence[str]) -> Command:
        """As ``run``, within a tmux session that goes on when the connection ends. Exits ``NO_TMUX`` without tmux."""
        ...

    def python(self, host: Host, module: str, args: Sequence[str]) -> Command:
        """``python -m module FOLDER args`` with the node's own gpuctl; FOLDER is the agent's. Its standard input ends
        when the connection does."""
        ...

    def trouble(self, host: Host, code: int) -> GpuctlError | None:
        """Why a command that ended with ``code`` never ran, if that is so."""
        ...


class Remote:
    """Over ssh with ``config`` (see ``ssh_config``). What ssh itself has to say goes into files in ``logs``, so that
    the other side's stderr is nothing but that; a person is told a line of it."""

    def __init__(self, cluster: str, config: Path, logs: Path, *, way_in: bool) -> None:
        self._cluster = cluster
        self._config = config
        self._logs = logs
        self._way_in = way_in

    def ssh(self, host: Host, *options: str) -> tuple[str, ...]:
        """The beginning of a command line, up to and without the host."""
        return ("ssh", "-F", str(self._config), "-E", str(self.log(host)), *options)

    def target(self, host: Host) -> str:
        if not host.address:
            raise GpuctlError(f"{host.node} has not said its address yet", f"see `gpuctl logs --boot {host.node}`")
        return name_of(self._cluster, host)

    @property
    def config(self) -> Path:
        return self._config

    def log(self, host: Host) -> Path:
        return self._logs / host.node

    def run(self, host: Host, words: Sequence[str], *, terminal: bool = False) -> Command:
        options = ["-t" if terminal else "-T"] if words else []
        return Command((*self.ssh(host, *options), self.target(host), *(["--", line_of(words)] if words else [])))

    def session(self, host: Host, words: Sequence[str]) -> Command:
        return self.run(host, [_tmux(SESSION, words)], terminal=True)

    def python(self, host: Host, module: str, args: Sequence[str]) -> Command:
        words = ("/opt/gpuctl/venv/bin/python", "-m", module, "/var/lib/gpuctl/node", *args)
        return self.run(host, [as_root(f"exec {shlex.join(words)}")])

    def forward(self, host: Host, local: int, port: int) -> Command:
        """Until it is ended: ``127.0.0.1:local`` here is ``localhost:port`` there."""
        options = ("-N", "-T", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{local}:localhost:{port}")
        return Command((*self.ssh(host, *options), self.target(host)))

    def said(self, host: Host) -> str:
        try:
            return self.log(host).read_text(errors="replace")
        except OSError:
            return ""

    def trouble(self, host: Host, code: int) -> GpuctlError | None:
        said = self.said(host)
        return explain(host, said, way_in=self._way_in) if code == _SSH_FAILED and said.strip() else None


class Here:
    """On ``local``: the node is a folder and an environment on this machine. ``places`` has both, by node."""

    def __init__(self, places: Mapping[str, tuple[Path, Mapping[str, str]]]) -> None:
        self._places = places

    def place(self, host: Host) -> tuple[Path, dict[str, str]]:
        """Raises ``GpuctlError`` if the node does not run on this machine."""
        if host.node not in self._places:
            running = ", ".join(self._places) or "none"
            raise GpuctlError(f"{host.node} does not run on this machine", f"running here: {running}")
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

    def python(self, host: Host, module: str, args: Sequence[str]) -> Command:
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


def explain(host: Host, said: str, *, way_in: bool) -> GpuctlError:
    """What ssh wrote when it could not connect, as one of our lines. ``way_in``: some node has a public address."""
    node = host.node
    if "HOST IDENTIFICATION HAS CHANGED" in said:
        return GpuctlError(
            f"{node} shows another host key than the one in the bucket, so it was refused",
            "somebody may be listening in, or the machine was set up anew: find out which",
        )
    if "host key is known" in said or "Host key verification failed" in said:
        if host.host_keys:
            return GpuctlError(
                f"{node} shows a host key of a kind that the bucket has none of, so it was refused",
                "the machine may have been set up anew: find out",
            )
        return GpuctlError(
            f"the bucket has no host key of {node}, so it was refused", f"see `gpuctl logs --boot {node}`"
        )
    if "Permission denied" in said:
        who = f"{host.user} on {node}" if host.user else node
        return GpuctlError(
            f"{who} takes none of the keys that ssh offers", "add the cluster's with `ssh-add`, or see `ssh-add -l`"
        )
    if found := _TROUBLE.search(said):
        inside = "" if host.is_public or way_in else ", and no node of this cluster has a public address"
        what = (found["what"] or found["name"]).strip()
        at = "" if host.address == node else f" at {host.address}"
        return GpuctlError(f"cannot reach {node}{at}: {what}{inside}", "see `gpuctl status`")
    return GpuctlError(f"cannot reach {node}: {said.strip().splitlines()[-1].strip()}", "see `gpuctl status`")


def _tmux(session: str, words: Sequence[str], *, server: str = "") -> str:
    tmux = ["tmux", *(["-L", server] if server else []), "new-session", "-A", "-s", session]
    wanted = [*tmux, *([line_of(words)] if words else [])]
    return f"command -v tmux >/dev/null || exit {NO_TMUX}; exec {shlex.join(wanted)}"
