"""What ``gpuctl up`` would create on a cloud: from flags to a request, and the plan as people read it."""

from __future__ import annotations

import dataclasses
import getpass
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from gpuctl import __version__
from gpuctl.cli.options import parse_flag, text_option, whole_number
from gpuctl.cli.settings import Settings
from gpuctl.cli.terminal import out, say, table
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.refusals import shown
from gpuctl.stacks import known, last_up
from gpuctl.stacks.cloud import cloud
from gpuctl.stacks.last_up import LastUp
from gpuctl.stacks.machines import CloudName, MachineType, Price, catalog, region_of
from gpuctl.stacks.offers import Wanted, cheapest, maybe_cheaper, offers, refreshing, some_of
from gpuctl.stacks.request import StackRequest

if TYPE_CHECKING:
    from gpuctl.stacks.planning import Plan

_USUAL_REGION = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}

Type = Annotated[
    str | None, text_option("--type", metavar="NAME", about="Instance type (default: the cheapest that fits).")
]
Gpu = Annotated[str | None, text_option("--gpu", metavar="NAME", about="Such as A100, where no type is named.")]
Gpus = Annotated[str | None, text_option("--gpus", metavar="N", about="GPUs of each machine, the same.")]
Region = Annotated[str | None, text_option("--region", metavar="NAME", about="Such as us-east-1.")]
Zone = Annotated[str | None, text_option("--zone", metavar="NAME", about="Such as us-east-1b.")]
Spot = Annotated[
    bool | None,
    typer.Option("--spot/--on-demand", help="On demand: not taken away, at full price.", show_default="spot"),
]


@dataclass(frozen=True, slots=True)
class MachineFlags:
    """Those of ``gpuctl up`` that only clouds know."""

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
        """Their names."""
        named: dict[str, str | bool | None] = {
            "--type": self.type,
            "--gpu": self.gpu,
            "--gpus": self.gpus,
            "--region": self.region,
        }
        named |= {
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
    there = known.get(settings.cluster)
    if there and settings.found["provider"].source == "default":
        settings = dataclasses.replace(settings, provider=there.provider)
    last = last_of(settings)
    if last and settings.found["nodes"].source == "default":
        settings = dataclasses.replace(settings, nodes=(last.request.nodes_min, last.request.nodes_max))
    return settings


def last_of(settings: Settings) -> LastUp | None:
    """What this cluster was asked for last, if it was of the same cloud."""
    found = last_up.find(settings.cluster)
    return found if found and found.request.provider == settings.provider else None


def backend_of(settings: Settings, last: LastUp | None) -> str:
    """Where Pulumi's state is: where it was, if the cluster is known. Raises ``BadInput`` for another one: a stack that
    is not there would be made a second time."""
    told = settings.backend or ""
    if last is None:
        return told
    if settings.found["backend"].source != "default" and told != last.backend:
        was, asked = (shown(url) or "a folder on this machine" for url in (last.backend, told))
        raise BadInput(
            f"Pulumi's state of {settings.cluster} is at {was}, and not at {asked}",
            "leave --backend out, or run `gpuctl down` first",
        )
    return last.backend


def request_of(settings: Settings, provider: CloudName, flags: MachineFlags, last: LastUp | None) -> StackRequest:
    """What is not said is as it was. Raises ``BadInput`` for what no cloud would take."""
    before = last.request if last else None
    machine, price = _machine(provider, flags, before)
    first_zone = cloud(provider).first_zone
    # Azure's zones are numbers, the same in every region.
    told = region_of(provider, flags.zone) if flags.zone and first_zone else None
    region = flags.region or told or (before and before.region) or (price and price.region) or _USUAL_REGION[provider]
    if flags.zone and first_zone and not flags.zone.startswith(region):
        raise BadInput(f"zone {flags.zone} is not in {region}", f"such as {first_zone.format(region)}")
    fewest, most = settings.nodes
    given = {
        "spot": flags.spot,
        "placement": flags.placement,
        "ssh_from": flags.ssh_from,
        "ssh_key": _public_key(flags.ssh_key, before),
        "image": flags.image,
        "bucket": settings.bucket,
    }
    usual = before or StackRequest(
        cluster=settings.cluster,
        provider=provider,
        type=machine.name,
        nodes_min=fewest,
        nodes_max=most,
        region=region,
        owner=getpass.getuser(),
        created=time.strftime("%Y-%m-%d", time.gmtime()),
    )
    return replace(
        usual,
        type=machine.name,
        nodes_min=fewest,
        nodes_max=most,
        region=region,
        zones=(flags.zone,) if flags.zone else (),
        version=__version__,
        **{name: value for name, value in given.items() if value is not None},
    )


def _machine(provider: CloudName, flags: MachineFlags, before: StackRequest | None) -> tuple[MachineType, Price | None]:
    if flags.type is None and before is not None and not (flags.gpu or flags.gpus):
        return catalog().type(before.type, provider), None
    if flags.type is None:
        gpus = parse_flag("--gpus", flags.gpus, whole_number(1))
        wanted = Wanted(provider=provider, region=flags.region, gpu=flags.gpu, gpus=gpus)
        spot = flags.spot is not False
        offer = cheapest(wanted, spot=spot, usual_region=_USUAL_REGION[provider])
        if silent := maybe_cheaper(offer, wanted, spot=spot):
            how = f"; {refreshing(silent[0], offer.price.region)}" if spot else ""
            where = offer.price.region
            say(f"note: nobody has told the price of {some_of(silent)} in {where}, which may be cheaper{how}")
        return offer.machine, offer.price
    if flags.gpu or flags.gpus:
        raise BadInput("--type names the machine already", "leave --gpu and --gpus out")
    machine = catalog().type(flags.type, provider)
    known = [offer.price for offer in offers(Wanted(provider=provider)) if offer.machine == machine]
    return machine, next((price for price in known if price.region), None)


def _public_key(path: str | None, before: StackRequest | None) -> str | None:
    """The user's own, where none is named and there is one. ``None``: as before."""
    if path is None and before is not None:
        return None
    usual = Path.home() / ".ssh" / "id_ed25519.pub"
    if path is None:
        return usual.read_text().strip() if usual.is_file() else ""
    try:
        text = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"--ssh-key {path} cannot be read: {error}", "name a file such as ~/.ssh/id_ed25519.pub"
        ) from error
    if not text.startswith(("ssh-", "ecdsa-", "sk-")) or "\n" in text:
        raise BadInput(f"{path} is no public key", "name a file such as ~/.ssh/id_ed25519.pub")
    return text


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


def _cost(plan: Plan) -> Iterator[str]:
    cost = plan.cost
    hour = cost.per_hour(plan.request.spot)
    for name, usd in (("spot", cost.spot), ("on demand", cost.on_demand)):
        yield f"machines, {name}: " + ("nobody has told us" if usd is None else f"${usd:.2f}/h")
    for what, usd in cost.extras.items():
        yield f"{what}: ${usd:.3f}/h"
    if hour is not None:
        yield f"all of it: ${hour:.2f}/h, ${24 * hour:.2f} a day (prices of {cost.date})"
    else:
        most = cost.per_hour(spot=False)
        if most is not None:
            yield f"all of it: at most ${most:.2f}/h, ${24 * most:.2f} a day (prices of {cost.date}, on demand)"


def as_json(plan: Plan) -> dict[str, Any]:
    import msgspec

    told: dict[str, Any] = msgspec.to_builtins(plan)
    return {**told, "counts": plan.counts()}
