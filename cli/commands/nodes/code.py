"""``gpuctl code``: a job's folder on a node, in an editor on this machine."""

from __future__ import annotations

import shutil
import subprocess
from typing import Annotated
from urllib.parse import quote

import typer

from gpuctl.cli.render.terminal import out, say
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, text_option
from gpuctl.cluster.jobs import queue
from gpuctl.stacks.ssh import config
from gpuctl.stacks.ssh.commands import NODE_FOLDER, LocalShell

_EDITORS = ("code", "cursor", "windsurf", "codium")
"""All of which take a folder's URL."""


def verb(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Node name, or index in rank order (default: 0, rank 0).")
    ] = None,
    job: Annotated[str | None, text_option("--job", metavar="JOB", about="Job id (default: the newest).")] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the URL.")] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Open a job's folder on a node in an editor.

    Prints its URL, for VS Code and its relatives with their extension for SSH. The folder is a copy: changes in it are
    gone with the node, and the next job has what lies on this machine.
    """
    with node_access.reached(reach(cluster, bucket)) as nodes:
        whose = queue.find(nodes.store, job).job
        host = nodes.chosen(node)
        below = f"jobs/{quote(whose)}/code"
        if isinstance(nodes.shell, LocalShell):
            folder, _ = nodes.shell.place(host)
            url = f"{folder.as_uri()}/{below}"
        else:
            config.install()
            url = f"vscode-remote://ssh-remote+{nodes.shell.target(host)}{NODE_FOLDER}/{below}"
    out(url)
    editor = next((path for name in _EDITORS if (path := shutil.which(name))), None)
    if no_open or not node_access.has_terminal():
        return
    if editor is None:
        say(f"no editor found here ({', '.join(_EDITORS)}); open that URL in yours")
        return
    subprocess.run([editor, "--folder-uri", url], check=False)
