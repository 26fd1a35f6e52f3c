"""``gpuctl image``: container images, built on a node and kept in the bucket."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpuctl.bootstrap.containers.build import BuildOrder
from gpuctl.cli.command_words import WithCommand, words_of
from gpuctl.cli.render.terminal import ago, confirm, count, out, out_json, say, size, table
from gpuctl.cli.session import node_access
from gpuctl.cli.session.job_upload import refuse_home, send_context
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, text_option, wants_json
from gpuctl.cli.text_commands import TextCommand, new_app
from gpuctl.cluster.environments import images
from gpuctl.cluster.environments.images import ALL, IN_BUCKET, NamedImage
from gpuctl.cluster.environments.registry import short
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.bucket import Bucket as Store
from gpuctl.cluster.views import job_status

app = new_app(name="image", help="Build, list or remove container images.")

_REFERENCE = re.compile(r"[a-z0-9][a-z0-9._:-]*(/[a-z0-9][a-z0-9._-]*)*(:[A-Za-z0-9_][A-Za-z0-9._-]*)?")
_DECIDED = re.compile(r"-[tfo]|--(tag|file|output|push|load)(=|$)")
_DOCKERFILES = ("Dockerfile", "Containerfile")


@app.command(cls=WithCommand)
def build(
    ctx: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder with the Dockerfile.")] = ".",
    file: Annotated[
        str | None, text_option("--file", "-f", metavar="PATH", about="Another Dockerfile, below FOLDER.")
    ] = None,
    name: Annotated[
        str | None, text_option("--name", metavar="NAME", about="Name in the bucket (default: the folder's).")
    ] = None,
    push: Annotated[
        str | None, text_option("--push", metavar="IMAGE", about="Push it to a registry instead, under this name.")
    ] = None,
    node: Annotated[
        str | None, text_option("--node", metavar="NODE", about="Node to build on (default: 0, rank 0).")
    ] = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Build an image from a Dockerfile on a node, and keep it in the bucket.

    Jobs use it by `--image bucket:NAME`; nodes fetch it from there, without a registry. What is excluded in
    .dockerignore is not sent. Words after `--` are further options of `docker build`, or `podman build`.
    """
    where = Path(folder)
    dockerfile = _dockerfile(where, file)
    if name and push:
        raise BadInput("--name and --push exclude each other", "--push keeps nothing in the bucket")
    if push and images.is_in_bucket(push):
        raise BadInput(f"--push {push} is not a registry's image", f"for the bucket: --name {push[len(IN_BUCKET) :]}")
    if push and not _REFERENCE.fullmatch(push):
        raise BadInput(f"--push {push} is not the name of an image", "use one such as ghcr.io/me/mine:1")
    options = tuple(words_of(ctx) or ())
    _refuse_options(options)
    called = "" if push else images.checked_name(name or _name_of(where))
    refuse_home(where)
    with node_access.reached(reach(cluster, bucket)) as nodes:
        host = nodes.chosen(node)
        code = send_context(nodes.store, where, dockerfile)
        order = BuildOrder(code=code, dockerfile=dockerfile, name=called, push=push or "", options=options)
        before = {layer for one in images.listed(nodes.store) for layer in one.image.layers}
        say(f"building on {host.node} (Ctrl-C ends it)")
        command = nodes.shell.python(host, "gpuctl.bootstrap.containers.build", [])
        node_access.leave_with(node_access.run(nodes, host, command, first=msgspec.json.encode(order) + b"\n"))
    if not push:
        if built := images.built(nodes.store, images.named(nodes.store, called)):
            stored, new = NamedImage(built, called).stored_bytes, {*built.layers} - before
            added = size(sum(layer.stored_bytes for layer in new))
            say(f"{IN_BUCKET}{called}: {count(len(built.layers), 'layer')}, {size(stored)}, {added} of it new")
        _drop_superseded(nodes.store, called)
    say(f"use it: gpuctl train --image {push or IN_BUCKET + called} SCRIPT")


@app.command(cls=TextCommand)
def ls(output: Output = "text", cluster: Cluster = None, bucket: Bucket = None) -> None:
    """List the images in the bucket."""
    as_json = wants_json(output)
    found = images.listed(reach(cluster, bucket).store)
    if as_json:
        out_json([_as_json(one) for one in found])
    elif found:
        header = ("NAME", "IMAGE", "LAYERS", "SIZE", "STORED", "BUILT", "ON")
        for line in table(header, [_row(one) for one in found], give=[0]):
            out(line)
    else:
        say("no images yet; `gpuctl image build` makes one")


@app.command(cls=TextCommand)
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Images shown by `gpuctl image ls`, or all.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Remove images from the bucket. Nodes that have one keep it for a while."""
    store = reach(cluster, bucket).store
    there = images.listed(store)
    named = {(one.name, one.image.digest): one for one in (images.find(there, name) for name in names if name != ALL)}
    chosen = there if names == [ALL] else [*named.values()]
    users = _users(store)
    for one in chosen:
        if job := users.get(one.image.digest):
            raise BadInput(f"image {_called(one)} is in use by {job}", f"wait, or: gpuctl cancel {job}")
    if not chosen:
        say("no images")
        return
    total = sum({layer.sha256: layer.stored_bytes for one in chosen for layer in one.image.layers}.values())
    if not yes and not confirm(f"remove {count(len(chosen), 'image')} (up to {size(total)})?"):
        raise BadInput("nothing was removed", "confirm with --yes")
    freed = images.remove(store, chosen)
    say(f"removed {', '.join(_called(one) for one in chosen)}: {size(freed)}")


def _dockerfile(folder: Path, file: str | None) -> str:
    """Its path in ``folder``. Raises ``BadInput``."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder", "name the one with the Dockerfile")
    names = [file] if file else _DOCKERFILES
    try:
        found = next((name for name in names if (folder / name).is_file()), None)
    except OSError as error:
        raise BadInput(
            f"cannot read {file or folder}: {error.strerror}", "name a Dockerfile below the folder"
        ) from error
    if found is None:
        raise BadInput(f"{folder} has no {' or '.join(names)}", "write one, or name it with --file")
    path = (folder / found).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BadInput(f"{found} is outside of {folder}, and only that is copied to the node", "move it there")
    return path.relative_to(folder.resolve()).as_posix()


def _refuse_options(options: Sequence[str]) -> None:
    """Raises ``BadInput`` for one that decides what ``build`` decides."""
    for option in options:
        if _DECIDED.match(option):
            name = option.partition("=")[0]
            raise BadInput(f"{name} after `--` is not for you to give", "see --name, --push and --file of this command")


def _name_of(folder: Path) -> str:
    """The folder's own, as images may be called."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name:
        raise BadInput("the folder's name cannot be an image's", "give one with --name")
    return name


def _drop_superseded(store: Store, name: str) -> None:
    """Remove what was called so before, unless a job still needs it."""
    users = _users(store)
    before = [one for one in images.listed(store) if not one.name and one.image.name == name]
    gone = [one for one in before if one.image.digest not in users]
    for one in before:
        if one not in gone:
            say(f"image {_called(one)}, {name} before, stays: {users[one.image.digest]} uses it")
    if gone:
        freed = images.remove(store, gone)
        say(f"removed what was {name} before: {size(freed)}")


def _users(store: Store) -> dict[str, str]:
    """By digest of an image, an unfinished job that needs it."""
    specs = [queue.find(store, job) for job in job_status.unfinished(store)]
    return {digest: spec.job for spec in specs if (digest := images.digest_of(spec.image))}


def _called(one: NamedImage) -> str:
    return one.name or short(one.image.digest)


def _row(one: NamedImage) -> list[str]:
    image = one.image
    unpacked = sum(layer.bytes for layer in dict.fromkeys(image.layers))
    return [
        one.name or f"({image.name} before)",
        short(image.digest),
        str(len(image.layers)),
        size(unpacked),
        size(one.stored_bytes),
        ago(image.built_at),
        image.node,
    ]


def _as_json(one: NamedImage) -> dict[str, object]:
    image = one.image
    return {
        "name": one.name,
        "image": image.digest,
        "layers": [
            {"sha256": layer.sha256, "bytes": layer.bytes, "stored_bytes": layer.stored_bytes} for layer in image.layers
        ],
        "stored_bytes": one.stored_bytes,
        "built_as": image.name,
        "built_at": image.built_at,
        "built_on": image.node,
    }
