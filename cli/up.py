"""``gpuctl up``"""

from __future__ import annotations

from typing import Annotated

from gpuctl.cli.options import Cluster, text_option
from gpuctl.cli.settings import load
from gpuctl.cli.terminal import count, out, say
from gpuctl.cluster.refusals import shown


def verb(
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="How many; 2:4 goes on with 2 of 4.")
    ] = None,
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="Where (default: local).")] = None,
    slots: Annotated[
        str | None, text_option("--slots", metavar="K", about="Worker processes per node (default: its GPUs, else 1).")
    ] = None,
    bucket: Annotated[
        str | None, text_option("--bucket", metavar="URL", about="Where its state and checkpoints go.")
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Make a cluster, or what is missing of it.

    Repeat it to replace nodes that were lost.
    """
    flags = {"cluster": cluster, "provider": provider, "nodes": nodes, "slots": slots, "bucket": bucket}
    settings = load(flags)
    from gpuctl.stacks.provider import UpRequest
    from gpuctl.stacks.provider import provider as provider_named

    fewest, most = settings.nodes
    request = UpRequest(
        name=settings.cluster, nodes_min=fewest, nodes_max=most, slots=settings.slots, bucket=settings.bucket
    )
    made = provider_named(settings.provider).up(request, say)
    size = count(most, "node") if fewest == most else f"{fewest} to {most} nodes"
    out(f"cluster {made.name} is up: {size} ({made.provider})")
    out(f"bucket: {shown(made.bucket)}")
    option = "" if made.name == "default" else f" --cluster {made.name}"
    say(f"next: gpuctl train script.py{option}")
