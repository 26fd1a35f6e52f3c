"""``gpuctl env``: the environments that jobs have run in, and their removal."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.render.terminal import ago, confirm, count, out, out_json, say, size, table
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, wants_json
from gpuctl.cli.text_commands import TextCommand, new_app
from gpuctl.cluster.environments import registry
from gpuctl.cluster.environments.registry import StoredEnvironment
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.views import job_status

app = new_app(name="env", help="List or remove the environments that jobs run in.")


@app.command(cls=TextCommand)
def ls(output: Output = "text", cluster: Cluster = None, bucket: Bucket = None) -> None:
    """List the environments in the bucket, the one that was used last first."""
    as_json = wants_json(output)
    found = registry.listed(reach(cluster, bucket).store)
    if as_json:
        out_json([_as_json(one) for one in found])
    elif found:
        header = ("ENVIRONMENT", "FROM", "PACKAGES", "SIZE", "STORED", "JOBS", "LAST USED")
        for line in table(header, [_row(one) for one in found], give=[1]):
            out(line)
    else:
        say("no environments yet; a job with a requirements.txt, uv.lock, pylock.toml or environment.yml makes one")


@app.command(cls=TextCommand)
def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="ENVIRONMENT...", help="Environments shown by `gpuctl env ls`, or all.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Remove environments from the bucket. A job that needs one again builds it again."""
    store = reach(cluster, bucket).store
    stored = registry.listed(store)
    chosen = stored if names == ["all"] else [registry.find(stored, name) for name in names]
    running = set(job_status.unfinished(store))
    for one in chosen:
        if busy := [job for job in one.jobs if job in running]:
            raise BadInput(f"environment {one.name} is in use by {busy[0]}", f"wait, or: gpuctl cancel {busy[0]}")
    if not chosen:
        say("no environments")
        return
    total = sum(one.bytes for one in chosen)
    if not yes and not confirm(f"remove {count(len(chosen), 'environment')} ({size(total)})?"):
        raise BadInput("nothing was removed", "confirm with --yes")
    for one in chosen:
        registry.remove(store, one.environment.digest)
        say(f"removed {one.name}")


def _row(one: StoredEnvironment) -> list[str]:
    environment = one.environment
    jobs = ", ".join(one.jobs[-2:]) + (f" +{len(one.jobs) - 2}" if len(one.jobs) > 2 else "")
    return [
        one.name,
        environment.file,
        str(len(environment.packages)),
        size(environment.bytes),
        size(one.bytes),
        jobs or "-",
        ago(one.used_at),
    ]


def _as_json(one: StoredEnvironment) -> dict[str, object]:
    environment = one.environment
    return {
        "environment": environment.digest,
        "from": environment.file,
        "packages": environment.packages,
        "bytes": environment.bytes,
        "stored_bytes": one.bytes,
        "python": environment.python,
        "platform": environment.platform,
        "torch": environment.torch,
        "jobs": list(one.jobs),
        "built_at": environment.built_at,
        "used_at": one.used_at,
    }
