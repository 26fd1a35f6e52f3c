"""``gpuctl cp``: copies files to or from a node."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from gpuctl.cli.render.terminal import say
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.ssh.commands import Command, LocalShell, SshShell
from gpuctl.stacks.ssh.hosts import Host

_SSH_FAILED = 255
_LOST = (12, _SSH_FAILED)
"""How rsync ends if ssh has ended: as ssh did, or because nothing came any more, whichever it sees first."""
_NOT_THERE = 127
"""How rsync ends if the other side has none."""


class CopyEndpoint(NamedTuple):
    """The source or the destination of a copy."""

    node: str | None
    """``None``: this machine. Empty: rank 0."""
    path: str


def verb(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source: PATH here, or NODE:PATH.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Destination: PATH here, or NODE:PATH.")],
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Copy files to or from a node.

    A folder is copied with all that is in it, into DST; with a slash at its end only what is in it. A path without a
    slash in front begins at the node's home folder, and `:PATH` is rank 0's. With rsync, else with scp.
    """
    from_, to = parse_end(source), parse_end(target)
    if (from_.node is None) == (to.node is None):
        what = "neither end is on a node" if to.node is None else "both ends are on nodes"
        raise BadInput(f"{source} to {target}: {what}", "write one end as NODE:PATH, such as 0:results")
    if from_.node is None and not Path(from_.path).exists():
        raise BadInput(f"{from_.path} does not exist on this machine", "check SRC")
    with node_access.reached(reach(cluster, bucket)) as nodes:
        host = nodes.chosen((from_.node if to.node is None else to.node) or None)
        if isinstance(nodes.shell, LocalShell):
            folder, _ = nodes.shell.place(host)
            _copy_here(*(_within(end, folder) for end in (from_, to)))
            return
        copy = _Copy(nodes, nodes.shell, host, from_, to)
        node_access.leave_with(copy.by_rsync() if _is_new_rsync() else copy.by_scp())


def parse_end(text: str) -> CopyEndpoint:
    """Parse one end of a copy: ``NODE:PATH``, or a path on this machine.

    >>> parse_end("0:out"), parse_end("./a:b"), parse_end("model.pt")
    (End(node='0', path='out'), End(node=None, path='./a:b'), End(node=None, path='model.pt'))
    """
    node, colon, path = text.partition(":")
    return CopyEndpoint(None, text) if not colon or "/" in node else CopyEndpoint(node, path or ".")


class _Copy:
    """A copy between this machine and ``host``."""

    def __init__(
        self, nodes: node_access.NodeAccess, shell: SshShell, host: Host, from_: CopyEndpoint, to: CopyEndpoint
    ) -> None:
        self._nodes = nodes
        self._shell = shell
        self._host = host
        self._from = from_
        self._to = to

    def by_rsync(self) -> int:
        code, said = _ended(self._rsync())
        if code == _NOT_THERE or "rsync: not found" in said or "rsync: command not found" in said:
            say(f"rsync is not installed on {self._host.node}: copying with scp")
            return self.by_scp()
        if trouble := self._shell.trouble(self._host, _SSH_FAILED if code in _LOST else code):
            raise trouble
        if code:
            first = next((line for line in said.splitlines() if line.strip()), f"exit {code}")
            raise GpuctlError(f"rsync could not copy: {first.removeprefix('rsync: ')}", "check both paths")
        return 0

    def _rsync(self) -> Command:
        """``-s``: a path is a path, and no line for the other side's shell."""
        ssh = shlex.join(self._shell.ssh(self._host))
        show = ("--info=progress2",) if sys.stdout.isatty() else ()
        ends = (self._named(end) for end in (self._from, self._to))
        return Command(("rsync", "-a", "-s", "--partial", *show, "-e", ssh, "--", *ends))

    def by_scp(self) -> int:
        """Copy with scp, by rsync's rule for folders."""
        if self._is_folder(self._from):
            inside = self._from.path.endswith("/")
            name = "" if inside else f"/{Path(self._from.path).name}"
            target = self._to._replace(path=f"{self._to.path.rstrip('/') or '/'}{name}")
            self._make_folder(target)
            return self._scp(self._from._replace(path=f"{self._from.path.rstrip('/')}/."), target)
        return self._scp(self._from, self._to)

    def _scp(self, from_: CopyEndpoint, to: CopyEndpoint) -> int:
        ends = (self._named(end) for end in (from_, to))
        options = self._shell.options(self._host)
        command = Command(("scp", "-F", str(self._shell.config), *options, "-q", "-r", "-p", "--", *ends))
        code, said = _ended(command)
        if code == _SSH_FAILED and (trouble := self._shell.trouble(self._host, code, said)):
            raise trouble
        if code:
            last = said.strip().splitlines()[-1] if said.strip() else f"exit {code}"
            raise GpuctlError(f"scp could not copy: {last.removeprefix('scp: ')}", "check both paths")
        return 0

    def _named(self, end: CopyEndpoint) -> str:
        if end.node is None:
            return end.path if end.path.startswith(("/", ".")) else f"./{end.path}"
        path = "." if end.path == "~" else end.path.removeprefix("~/") or "."
        return f"{self._shell.target(self._host)}:{path}"

    def _is_folder(self, end: CopyEndpoint) -> bool:
        return Path(end.path).is_dir() if end.node is None else self._ask(("test", "-d", end.path)) == 0

    def _make_folder(self, end: CopyEndpoint) -> None:
        if end.node is None:
            Path(end.path).mkdir(parents=True, exist_ok=True)
        elif self._ask(("mkdir", "-p", "--", end.path)):
            raise GpuctlError(f"cannot create the folder {end.path} on {self._host.node}", "check DST")

    def _ask(self, words: tuple[str, ...]) -> int:
        return node_access.run(self._nodes, self._host, self._shell.run(self._host, words))


def _ended(command: Command) -> tuple[int, str]:
    """Exit code of ``command``, and what it wrote to its standard error. Into a file, because a connection that later
    commands share may hold a pipe open for as long as it lasts: its ProxyCommand has that too."""
    with tempfile.NamedTemporaryFile() as said:
        with node_access.started(command, stderr=said) as process:
            code = process.wait()
        return code, Path(said.name).read_text(errors="replace")


def _is_new_rsync() -> bool:
    """macOS has one of 2006, or another program of that name: neither takes a path for a path."""
    if not shutil.which("rsync"):
        return False
    done = subprocess.run(("rsync", "--version"), capture_output=True, text=True, check=False, timeout=10)
    return "version 3" in done.stdout


def _within(end: CopyEndpoint, folder: Path) -> CopyEndpoint:
    return (
        end
        if end.node is None
        else CopyEndpoint(None, str(folder / end.path) + ("/" if end.path.endswith("/") else ""))
    )


def _copy_here(from_: CopyEndpoint, to: CopyEndpoint) -> None:
    """Copy between two folders of this machine, with rsync's rule for folders."""
    source, target = Path(from_.path), Path(to.path)
    try:
        if source.is_dir():
            inside = target if from_.path.endswith("/") else target / source.resolve().name
            shutil.copytree(source, inside, dirs_exist_ok=True, symlinks=True)
        else:
            if to.path.endswith("/"):
                target.mkdir(exist_ok=True)  # as rsync: one folder, and not those above it
            shutil.copy2(source, target)
    except (OSError, shutil.Error) as error:
        raise GpuctlError(f"cannot copy {source}: {error}", "check both paths") from error
