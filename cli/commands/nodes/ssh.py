"""``gpuctl ssh``: logs in to a node, or runs a command there."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.command_words import WithCommand, words_of
from gpuctl.cli.render.terminal import out
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster
from gpuctl.cli.settings.resolve import load
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.stacks.ssh import config
from gpuctl.stacks.ssh.commands import NO_TMUX
from gpuctl.stacks.state import clusters

COMMAND = WithCommand


def verb(
    ctx: typer.Context,
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Node name, or index in rank order (default: 0, rank 0).")
    ] = None,
    tmux: Annotated[
        bool, typer.Option("--tmux", help="Use the tmux session `gpuctl`, which survives a lost connection.")
    ] = False,
    install_config: Annotated[
        bool, typer.Option("--install-config", help="Make plain `ssh CLUSTER-0` work: adds a line to ~/.ssh/config.")
    ] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Log in to a node, or run a command there.

    Host keys are those that the bucket has. After --install-config, ssh, rsync and editors know the nodes as CLUSTER-0,
    CLUSTER-1 … in rank order, and as CLUSTER-NODE.
    """
    words = words_of(ctx)
    if words == []:
        raise BadInput("no command after `--`", "for example: gpuctl ssh 0 -- nvidia-smi")
    if tmux and not node_access.has_terminal():
        raise BadInput("--tmux needs a terminal", "leave it out, or use `gpuctl exec`")
    if install_config:
        _refuse_local(cluster, bucket)
        path, is_new = config.install()
        out(f"{path}: {'one line added' if is_new else 'already has that line'}")
        if node is None and words is None and not tmux:
            return
    with node_access.reached(reach(cluster, bucket)) as nodes:
        host = nodes.chosen(node)
        shell = nodes.shell
        if tmux:
            command = shell.session(host, words or [])
        else:
            command = shell.run(host, words or [], terminal=node_access.has_terminal())
        code = node_access.run(nodes, host, command)
    if tmux and code == NO_TMUX:
        raise GpuctlError(
            f"tmux is not installed on {host.node}",
            f"install it: gpuctl exec {host.node} -- sudo apt-get install -y tmux",
        )
    node_access.leave_with(code)


def _refuse_local(cluster: str | None, bucket: str | None) -> None:
    """Raises ``BadInput`` if the nodes have no sshd that an entry in the configuration could lead to, or a cluster that
    is named is not known."""
    if bucket is not None:
        spec = queue.cluster_spec(reach(cluster, bucket).store)
        name, provider = spec.name, spec.provider
    else:
        settings = load({"cluster": cluster}, only=("cluster",))
        name, is_named = settings.cluster, settings.found["cluster"].source != "default"
        there = clusters.find(name) if is_named else clusters.get(name)
        provider = there.provider if there else ""
    if provider == "local":
        raise BadInput(f"the nodes of {name} run on this machine, without an sshd", "use `gpuctl exec`")
