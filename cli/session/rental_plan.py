"""From the flags of ``gpuctl up`` on a cloud to a request."""

from __future__ import annotations

import dataclasses
import getpass
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from gpuctl import __version__
from gpuctl.cli.render.terminal import say
from gpuctl.cli.settings.options import parse_flag, text_option, whole_number
from gpuctl.cli.settings.resolve import Settings
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.stacks.catalog import region_names
from gpuctl.stacks.catalog.instance_types import CloudName, MachineType, catalog, region_of
from gpuctl.stacks.catalog.offers import MachineFilter, choose, in_cheapest_regions, offers
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.clouds.regions import Region
from gpuctl.stacks.providers.ownership import place
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest
from gpuctl.stacks.request.stack_request import StackRequest, today
from gpuctl.stacks.ssh import keys
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import command

Type = Annotated[
    str | None, text_option("--type", metavar="NAME", about="Instance type (default: the cheapest that fits).")
]
Gpu = Annotated[str | None, text_option("--gpu", metavar="NAME", about="GPU, such as A100; instead of --type.")]
Gpus = Annotated[str | None, text_option("--gpus", metavar="N", about="GPUs per machine (default: the fewest sold).")]
RegionFlag = Annotated[
    str | None, text_option("--region", metavar="NAME[,NAME]", about="For example us-east-1; the cheapest of several.")
]
_ANY = "any"
Zone = Annotated[
    str | None,
    text_option("--zone", metavar="NAME", about="For example us-east-1b; any: no longer only the one named before."),
]
Bucket = Annotated[str | None, text_option("--bucket", metavar="URL", about="Bucket for state and checkpoints.")]
Placement = Annotated[
    bool | None,
    typer.Option(
        "--placement/--no-placement",
        help="Place nodes close together if they have a fabric; apart they are slower, but easier to get.",
        show_default="side by side",
    ),
]
Spot = Annotated[
    bool | None,
    typer.Option(
        "--spot/--on-demand", help="Use on-demand machines: never preempted, at full price.", show_default="spot"
    ),
]


@dataclass(frozen=True, slots=True)
class MachineFlags:
    """The flags of ``gpuctl up`` that apply to clouds only."""

    type: str | None = None
    gpu: str | None = None
    gpus: str | None = None
    region: str | None = None
    zone: str | None = None
    spot: bool | None = None
    ssh_from: str | None = None
    ssh_key: str | None = None
    image: str | None = None
    placement: bool | None = None

    @property
    def is_me(self) -> bool:
        """Whoever types this may log in, from where that is."""
        return self.ssh_from == "me"

    def given(self) -> list[str]:
        """The names of the flags that were given."""
        named: dict[str, str | bool | None] = {
            "--type": self.type,
            "--gpu": self.gpu,
            "--gpus": self.gpus,
            "--region": self.region,
            "--zone": self.zone,
            "--spot": self.spot,
            "--on-demand": self.spot is False,
            "--ssh-from": self.ssh_from,
            "--ssh-key": self.ssh_key,
            "--image": self.image,
            "--placement": self.placement,
            "--no-placement": self.placement is False,
        }
        return [name for name, value in named.items() if value]


def standing(settings: Settings) -> Settings:
    """A cluster that is there stays with its provider, and as large as it is, where nothing else is said."""
    there = last_request.recalled(settings.cluster)
    if there and settings.found["provider"].source == "default":
        settings = dataclasses.replace(settings, provider=there.provider)
    last = last_of(settings)
    if last and settings.found["nodes"].source == "default":
        settings = dataclasses.replace(settings, nodes=(last.request.nodes_min, last.request.nodes_max))
    return settings


def last_of(settings: Settings) -> LastRequest | None:
    """The last request for this cluster, if it was of the same cloud."""
    found = last_request.find(settings.cluster)
    return found if found and found.request.provider == settings.provider else None


def backend_of(settings: Settings, last: LastRequest | None) -> str:
    """The URL of Pulumi's state: where it was, if the cluster is known. Raises ``BadInput`` for another one: a stack
    that is not there would be made a second time."""
    told = settings.backend or ""
    if last is None:
        return told
    if settings.found["backend"].source != "default" and told != last.backend:
        was, asked = (shown(url) or "a folder on this machine" for url in (last.backend, told))
        raise BadInput(
            f"Pulumi's state of {settings.cluster} is in {was}, not in {asked}",
            f"leave --backend out, or run `{command('down', settings.cluster)}` first",
        )
    return last.backend


def request_of(
    settings: Settings, provider: CloudName, flags: MachineFlags, last: LastRequest | None, *, new_region: bool = False
) -> StackRequest:
    """The request that flags and settings make; what is not said is as it was. Raises ``BadInput`` for what no cloud
    would take.

    Args:
        settings: name the cluster, its number of nodes, its bucket and, where no flag does, its region.
        provider: the cloud.
        flags: as they were typed.
        last: the last request for this cluster; ``None``: it is new.
        new_region: whether a region that is not known will do, because the cloud is asked next.
    """
    before = last.request if last else None
    there = before.region if before else _attached_in(settings.cluster, provider)
    machine, region = _machine_in(_regions(settings, provider, flags, there, new=new_region), provider, flags, before)
    say(f"region: {region.name} ({region.source})")
    fewest, most = settings.nodes
    given = {
        "spot": flags.spot,
        "placement": flags.placement,
        "ssh_from": flags.ssh_from,
        "ssh_key": _public_key(flags.ssh_key, before, is_needed=bool(flags.ssh_from or (before and before.ssh_from))),
        "image": flags.image,
        "bucket": _bucket(settings, before, region.name),
    }
    usual = before or StackRequest(
        cluster=settings.cluster,
        provider=provider,
        type=machine.name,
        nodes_min=fewest,
        nodes_max=most,
        region=region.name,
        owner=getpass.getuser(),
        created=today(),
    )
    return replace(
        usual,
        type=machine.name,
        nodes_min=fewest,
        nodes_max=most,
        region=region.name,
        zones=_zones(flags, last, region.name),
        version=__version__,
        **{name: value for name, value in given.items() if value is not None},
    )


def named_regions(settings: Settings, provider: CloudName, flag: str | None, *, new: bool = False) -> list[Region]:
    """The regions given by the flag or the setting, or none. Raises ``BadInput`` for one that is not known.

    Args:
        settings: hold the setting, which counts where the flag is not given.
        provider: the cloud whose regions they are.
        flag: names with commas between them; ``None``: the flag was not given.
        new: whether a region that is not known will do if its name looks like one, because the cloud is asked next.
    """
    setting = settings.found["region"]
    if flag is not None:
        names, source = [name.strip() for name in flag.split(",") if name.strip()], "--region"
        if not names:
            raise BadInput("--region is empty", f"for example {regions.USUAL[provider]}")
    else:
        names, source = list(settings.region), setting.source.removeprefix("env ")
    return [Region(region_names.check(provider, name, new=new), source) for name in names]


def set_regions(settings: Settings, provider: CloudName) -> list[Region]:
    """The regions of the setting; none where it is about another cloud."""
    try:
        return named_regions(settings, provider, None)
    except BadInput:
        return []


def _attached_in(cluster: str, provider: CloudName) -> str:
    """The region of a cluster that was made on another machine."""
    known = clusters.get(cluster)
    return known.region if known and known.provider == provider else ""


def _regions(settings: Settings, provider: CloudName, flags: MachineFlags, there: str, *, new: bool) -> list[Region]:
    """One, or several that are named: the cheapest of them is taken.

    A cluster that is there stays where it is, unless a flag says another region: what a file or the environment says is
    of clusters to come.
    """
    named = named_regions(settings, provider, flags.region, new=new)
    first_zone = cloud(provider).first_zone
    if flags.zone and flags.zone != _ANY and first_zone:  # Azure's zones are numbers, the same in every region
        of_zone = region_names.check(provider, region_of(provider, flags.zone), new=new)
        if flags.region is not None and of_zone not in [one.name for one in named]:
            among = ", ".join(one.name for one in named)
            raise BadInput(f"zone {flags.zone} is not in {among}", f"for example {first_zone.format(named[0].name)}")
        return [Region(of_zone, f"--zone {flags.zone}")]
    if there and (flags.region is None or there in [one.name for one in named]):
        return [regions.choose(provider, of_cluster=there)]
    if named:
        return named
    usual = regions.choose(provider)
    return [Region(region_names.check(provider, usual.name, new=new), usual.source)]


def _zones(flags: MachineFlags, last: LastRequest | None, region: str) -> tuple[str, ...]:
    """The one that the flag names, or named before in the same region."""
    if flags.zone is not None:
        return () if flags.zone == _ANY else (flags.zone,)
    return last.terms.zones if last and last.request.region == region else ()


def _machine_in(
    among: Sequence[Region], provider: CloudName, flags: MachineFlags, before: StackRequest | None
) -> tuple[MachineType, Region]:
    """The machine to rent, and its region: the cheapest where several regions, or no type, are named."""
    names = tuple(one.name for one in among)
    if flags.type is not None and (flags.gpu or flags.gpus):
        raise BadInput("--type already chooses the machine", "leave --gpu and --gpus out")
    if flags.type is None and not (before is not None and not (flags.gpu or flags.gpus)):
        gpus = parse_flag("--gpus", flags.gpus, whole_number(1))
        spot = flags.spot if flags.spot is not None else (before is None or before.spot)
        choice = choose(MachineFilter(provider=provider, regions=names, gpu=flags.gpu, gpus=gpus), spot=spot)
        for line in choice.describe(spot=spot):
            say(line)
        return choice.offer.machine, _cheapest_of(among, choice.offer.price.region)
    machine = catalog().type(flags.type or (before.type if before else ""), provider)
    sold = [one for one in offers(MachineFilter(provider=provider, regions=names)) if one.machine == machine]
    cheapest = in_cheapest_regions(sold)
    return machine, _cheapest_of(among, cheapest[0].price.region if cheapest else names[0])


def _cheapest_of(among: Sequence[Region], name: str) -> Region:
    """The one of that name, which says so if there were others."""
    (region,) = [one for one in among if one.name == name][:1]
    if len(among) == 1:
        return region
    return Region(name, f"{region.source}: the cheapest of {', '.join(one.name for one in among)}")


def _bucket(settings: Settings, before: StackRequest | None, region: str) -> str | None:
    """A cluster that is there stays at its bucket, with its jobs and checkpoints, unless the flag names another; a
    name that gpuctl makes has the region in it. ``None``: as before."""
    setting = settings.found["bucket"]
    if before is None or setting.source == "flag":
        return settings.bucket
    there = before.bucket_url()
    if settings.bucket and place(settings.bucket) != place(before.bucket or there):
        say(f"bucket: {shown(there)}, as before, not that of {setting.source.removeprefix('env ')}")
    if before.bucket or region == before.region:
        return None
    say(f"bucket: {shown(there)} stays in {before.region}; from {region} it is slower, and the traffic is billed")
    return there


def _public_key(path: str | None, before: StackRequest | None, *, is_needed: bool) -> str | None:
    """The user's own, where none is named and there is one. ``None``: as before. Raises ``BadInput``."""
    if path is not None:
        return keys.read(Path(path).expanduser())
    if before is not None and (before.ssh_key or not is_needed):
        return None
    return keys.usual()
