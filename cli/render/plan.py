"""The plan of what ``gpuctl up`` would create on a cloud, as people and programs read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpuctl.cli.render.terminal import out, say, table

if TYPE_CHECKING:
    from gpuctl.stacks.plan.planner import Plan

_NOT_IN_IT = "not included: what the bucket holds, and traffic"


def show(plan: Plan) -> None:
    """The table on standard output, and what there is to say of it on standard error."""
    request, machine = plan.request, plan.machine
    where = ", ".join(request.zones) or request.region
    kind = "spot" if request.spot else "on demand"
    out(f"{request.nodes_max} x {machine.name} ({machine.gpus} {machine.gpu}, {kind}) in {where}, {request.provider}")
    for line in table(("RESOURCES", "KIND"), [[str(many), kind] for kind, many in sorted(plan.counts().items())]):
        out(f"  {line}")
    for line in _cost(plan):
        out(line)
    for finding in plan.findings:
        say(f"{finding.severity}: {finding.message}" + (f"; {finding.hint}" if finding.hint else ""))
    say(f"not checked: {', '.join(plan.unchecked)}")


def show_changes(plan: Plan, changes: Sequence[str]) -> None:
    """Show what will change in an existing cluster, and what it costs from now on."""
    for line in changes or ["no changes"]:
        out(line)
    *_, cost = _cost(plan)
    out(cost)
    for finding in plan.findings:
        if finding.severity == "error":
            say(f"error: {finding.message}" + (f"; {finding.hint}" if finding.hint else ""))


def _cost(plan: Plan) -> Iterator[str]:
    cost = plan.cost
    hour = cost.per_hour(plan.request.spot)
    for name, usd in (("spot", cost.spot), ("on demand", cost.on_demand)):
        yield f"machines, {name}: " + ("price not available" if usd is None else f"${usd:.2f}/h")
    for what, usd in cost.extras.items():
        yield f"{what}: ${usd:.3f}/h"
    if hour is not None:
        yield f"total: ${hour:.2f}/h, ${24 * hour:.2f} a day (prices of {cost.date}); {_NOT_IN_IT}"
    else:
        most = cost.per_hour(spot=False)
        if most is not None:
            dated = f"prices of {cost.date}, on demand"
            yield f"total: at most ${most:.2f}/h, ${24 * most:.2f} a day ({dated}); {_NOT_IN_IT}"


def as_json(plan: Plan) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(plan)
    return {**told, "counts": plan.counts()}
