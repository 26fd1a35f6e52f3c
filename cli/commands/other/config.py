"""``gpuctl config``: shows the settings and where each comes from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Annotated

from gpuctl.cli.render.terminal import out, out_json, say, table
from gpuctl.cli.settings.options import Cluster, Output, text_option, wants_json
from gpuctl.cli.settings.resolve import KEYS, load
from gpuctl.cli.text_commands import TextCommand, new_app

app = new_app(name="config", help="Show the settings and where each comes from.")


@app.callback()
def group() -> None:
    """So that ``show`` is a verb below this one."""


@app.command(cls=TextCommand)
def show(
    cluster: Cluster = None,
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="As for up.")] = None,
    hosts: Annotated[str | None, text_option("--hosts", metavar="A,B", about="As for up.")] = None,
    nodes: Annotated[str | None, text_option("--nodes", metavar="N|MIN:MAX", about="As for up.")] = None,
    slots: Annotated[str | None, text_option("--slots", metavar="K", about="As for up.")] = None,
    bucket: Annotated[str | None, text_option("--bucket", metavar="URL", about="As for up.")] = None,
    backend: Annotated[str | None, text_option("--backend", metavar="URL", about="As for up.")] = None,
    max_restarts: Annotated[str | None, text_option("--max-restarts", metavar="N", about="See train.")] = None,
    exit_timeout: Annotated[str | None, text_option("--exit-timeout", metavar="SECONDS", about="See train.")] = None,
    nproc: Annotated[str | None, text_option("--nproc", metavar="K", about="See train.")] = None,
    launcher: Annotated[str | None, text_option("--launcher", metavar="NAME", about="See train.")] = None,
    strategy: Annotated[
        str | None, text_option("--strategy", metavar="NAME[:OPTION=VALUE,…]", about="See train.")
    ] = None,
    env: Annotated[list[str] | None, text_option("--env", metavar="NAME=VALUE", about="See train.")] = None,
    output: Output = "text",
) -> None:
    """Print every setting, its value, and which source won.

    A flag comes before the environment (GPUCTL_NODES), that before gpuctl.yaml (the nearest one upward), that before
    the default.
    """
    as_json = wants_json(output)
    settings = load(
        {
            "cluster": cluster,
            "provider": provider,
            "hosts": hosts,
            "nodes": nodes,
            "slots": slots,
            "bucket": bucket,
            "backend": backend,
            "max_restarts": max_restarts,
            "exit_timeout": exit_timeout,
            "nproc": nproc,
            "launcher": launcher,
            "strategy": strategy,
            "env": env or (),
        }
    )
    for line in _misspelt(os.environ):
        say(line)
    if as_json:
        out_json({key: {"value": s.text or None, "source": s.source} for key, s in settings.found.items()})
        return
    rows = [(key, setting.text or "-", setting.source) for key, setting in settings.found.items()]
    for line in table(("KEY", "VALUE", "SOURCE"), rows, give=[1]):
        out(line)


def _misspelt(env: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is no setting, and nearly one."""
    names = [key.variable for key in KEYS]
    for name in sorted(env.keys() - set(names)):
        if name.startswith("GPUCTL_") and (near := difflib.get_close_matches(name, names, n=1, cutoff=0.85)):
            yield f"{name} is ignored; did you mean {near[0]}?"
