"""The regions where ``gpuctl leaks`` and ``gpuctl buckets`` look, and why: wherever ``up`` has rented from here, or
would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuctl.cli.render.terminal import say
from gpuctl.cli.session.rental_plan import set_regions
from gpuctl.cli.settings.resolve import Settings
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName, cloud_named
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state import clusters


@dataclass(frozen=True, slots=True)
class RegionSet:
    """The regions of one cloud to look in, or all of them."""

    provider: CloudName
    regions: tuple[str, ...]
    why: Mapping[str, str]
    """By region: what named it."""

    def describe(self, seen: Sequence[str]) -> str:
        """Describe the regions that were ``seen``."""
        return f"{self.provider}: " + ", ".join(
            f"{name} ({self.why[name]})" if name in self.why else name for name in seen
        )


def clouds_to_ask(settings: Settings, cluster: str | None) -> list[CloudName]:
    """The one that a flag names; of a cluster that is known here, its own; else all that were ever used from here, and
    the configured one. Raises ``BadInput`` if there is none of these."""
    if settings.found["provider"].source == "flag":
        return [cloud(settings.provider).name]
    if found := _of(cluster):
        return [found]
    there = {one.provider for one in clusters.known_clusters(say)} | {settings.provider}
    used = [name for name in CLOUDS if name in there or regions.used(name)]
    if not used:
        raise BadInput("no cloud has been used from this machine", f"name one: --provider {', '.join(CLOUDS)}")
    return used


def places_of(provider: CloudName, named: Sequence[str], cluster: str | None, settings: Settings) -> RegionSet:
    """``named``: by flags, or ``all``; else where the cluster is, ``up`` would rent, and this user was."""
    if named:
        chosen = tuple(dict.fromkeys(named))
        return RegionSet(provider, chosen, {} if "all" in chosen else dict.fromkeys(chosen, "--region"))
    why = dict.fromkeys(regions.used(provider), "used before")
    for one in (*set_regions(settings, provider), regions.choose(provider)):
        why[one.name] = f"{why[one.name]}, {one.source}" if one.name in why else one.source
    for there in [last_request.recalled(cluster)] if cluster else clusters.known_clusters():
        if there and there.provider == provider and there.region:
            why[there.region] = f"cluster {there.name} is there"
    return RegionSet(provider, tuple(dict.fromkeys([*regions.to_search(provider), *why])), why)


def _of(cluster: str | None) -> CloudName | None:
    """The cloud of a cluster that this machine knows."""
    there = last_request.recalled(cluster) if cluster else None
    return cloud_named(there.provider) if there else None
