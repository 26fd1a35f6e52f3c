"""``gpuctl ssh``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli import remote
from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster
from gpuctl.cli.terminal import out
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks import ssh_config
from gpuctl.stacks.shell import NO_TMUX

COMMAND = remote.WithCommand


def verb(
    ctx: typer.Context,
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Its name or its index in rank order (default: 0, rank 0).")
    ] = None,
    tmux: Annotated[
        bool, typer.Option("--tmux", help="In the tmux session `gpuctl`, which goes on when the connection ends.")
    ] = False,
    install_config: Annotated[
        bool, typer.Option("--install-config", help="Let plain `ssh CLUSTER-0` work: one line in ~/.ssh/config.")
    ] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Log in to a node, or run a command there on this terminal.

    Host keys are those that the bucket has. After --install-config, ssh, rsync and editors know the nodes as CLUSTER-0,
    CLUSTER-1 … in rank order, and as CLUSTER-NODE.
    """
    words = remote.words_of(ctx)
    if words == []:
        raise BadInput("there is no command after `--`", "such as: gpuctl ssh 0 -- nvidia-smi")
    if tmux and not remote.has_terminal():
        raise BadInput("--tmux needs a terminal", "leave it out, or use `gpuctl exec`")
    if install_config:
        path, is_new = ssh_config.install()
        out(f"{path}: {'one line added' if is_new else 'it has the line already'}")
        if node is None and words is None and not tmux:
            return
    with remote.reached(reach(cluster, bucket)) as nodes:
        host = nodes.chosen(node)
        shell = nodes.shell
        if tmux:
            command = shell.session(host, words or [])
        else:
            command = shell.run(host, words or [], terminal=remote.has_terminal())
        code = remote.run(nodes, host, command)
    if tmux and code == NO_TMUX:
        raise GpuctlError(
            f"there is no tmux on {host.node}", f"install it: gpuctl exec {host.node} -- sudo apt-get install -y tmux"
        )
    remote.leave_with(code)
