"""The properties of a cluster that cannot be changed once it stands."""

from __future__ import annotations

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state.clusters import command

_APART = {True: "side by side", False: "apart"}
"""By ``request.placement``."""


def for_good(request: StackRequest) -> tuple[object, ...]:
    """The properties that one cloud or another lets nobody change of a group, or of what it is in."""
    return request.region, request.zones, request.type, request.spot, request.placement


def refuse_changes(before: StackRequest, request: StackRequest, zones: tuple[str, ...]) -> None:
    """Refuse changes to what cannot change in a cluster with machines in ``zones``. Raises ``BadInput``."""
    same = {
        "machines of": (before.type, request.type),
        "machines in": (before.region, request.region),
        "machines in zone": (", ".join(zones), ", ".join(request.zones or zones)),
        # No cloud deletes a placement that machines are in.
        "machines that were to be": (_APART[before.placement], _APART[request.placement]),
        "its bucket at": (before.bucket_url(), request.bucket_url()),
    }
    if request.provider == "azure":  # elsewhere the next machines are of the other kind
        same["machines"] = _terms(before), _terms(request)
    for what, (is_so, asked) in same.items():
        if is_so != asked:
            raise BadInput(
                f"{request.cluster} has {what} {is_so}, not {asked}",
                f"run `{command('down', request.cluster)}` first, or choose another name with --cluster",
            )


def _terms(request: StackRequest) -> str:
    return "as spot" if request.spot else "on demand"
