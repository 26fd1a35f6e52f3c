"""Resources with our tags, found by asking AWS kind by kind, whatever Pulumi's state knows of them.

The bucket is not among them: it is kept on purpose. IAM knows no regions and no search by tag, so roles and profiles
are those with our names (see ``identity``) and our tags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.answers import Denied, Leftover, Scan
from gpuctl.stacks.clouds.aws import NAT_USD_PER_HOUR, PUBLIC_ADDRESS_USD_PER_HOUR, VOLUME_USD_PER_GB_MONTH
from gpuctl.stacks.clouds.aws.client import Connect, connecting, regions, understood, unknown_region, who
from gpuctl.stacks.clouds.aws.partition import home
from gpuctl.stacks.clouds.aws.usual_region import usual_region
from gpuctl.stacks.clouds.interface import HOURS_A_MONTH

OURS = "gpuctl-"
"""Roles and profiles have names that begin so."""
_TAG = "gpuctl:cluster"
_ALL = "all"
_AT_ONCE = 16
"""Requests on their way. AWS answers more, and begins to refuse some."""

Answer = dict[str, Any]
"""One thing, as boto3 has it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of thing that ``describe`` calls list with its tags."""

    what: str
    call: str
    within: tuple[str, ...]
    """Keys of the lists in the answer, the outer one first."""
    id: str
    gone: tuple[str, ...] = ()
    """States in which AWS still shows it for a while, and it is no more."""
    about: tuple[str, ...] = ()
    """Keys of what to tell of it."""
    usd: Callable[[Answer, str], float | None] = lambda _thing, _region: 0.0
    """For an hour, in a region."""
    service: str = "ec2"


def scan(wanted: Sequence[str], cluster: str | None = None, connect: Connect | None = None) -> Scan:
    """See ``Cloud``. What AWS refuses to show is told in ``unseen``. Raises ``BadInput`` for a region that AWS
    does not have."""
    connect = connect or connecting()
    at = next((region for region in wanted if region != _ALL), None) or usual_region()[0]
    if not at and _ALL not in wanted:
        raise BadInput("no region is set", "add --region us-east-1, or set AWS_REGION")
    who(connect, home(at))
    places, disabled = _places(connect, wanted or [at], at)
    clients = {(service, place): connect(service, place) for place in places for service in ("ec2", "autoscaling")}
    looks = [
        (f"{kind.what}s in {place}", partial(_found, kind, clients[kind.service, place], place, cluster))
        for place in places
        for kind in KINDS
    ]
    iam = connect("iam", home(at))
    looks += [("roles", partial(_roles, iam, cluster)), ("instance profiles", partial(_profiles, iam, cluster))]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = list(pool.map(_seen, looks))
    found = [one for part in seen if not isinstance(part, str) for one in part]
    return Scan(
        regions=places,
        found=tuple(sorted(found, key=_order)),
        # What is in a region that was disabled runs on, and is paid for: docs.aws.amazon.com/accounts.
        unseen=(
            *(f"{region}: it is not enabled for this account" for region in disabled),
            *(part for part in seen if isinstance(part, str)),
        ),
    )


def rules(leftovers: Sequence[Leftover], connect: Connect | None = None) -> list[Leftover]:
    """Rules of the security groups among ``leftovers``: they may carry no tag. Raises ``GpuctlError``."""
    connect = connect or connecting()
    groups = {one.id: one for one in leftovers if one.kind == "security group"}
    found = []
    for region in sorted({one.region for one in groups.values()}):
        here = [one.id for one in groups.values() if one.region == region]
        with understood():
            pages = connect("ec2", region).get_paginator("describe_security_group_rules")
            for page in pages.paginate(Filters=[{"Name": "group-id", "Values": here}]):
                found += [
                    structs.replace(groups[rule["GroupId"]], kind="security group rule", id=rule["SecurityGroupRuleId"])
                    for rule in page["SecurityGroupRules"]
                ]
    return found


def _places(connect: Connect, wanted: Sequence[str], at: str) -> tuple[tuple[str, ...], list[str]]:
    """The regions to look into, and those that were asked for and are not enabled."""
    try:
        enabled = regions(connect, at)
    except Denied:
        if _ALL in wanted:
            raise
        return tuple(dict.fromkeys(wanted)), []
    if _ALL in wanted:
        return tuple(sorted(region for region, is_on in enabled.items() if is_on)), []
    for region in wanted:
        if region not in enabled:
            raise unknown_region(region, enabled)
    return tuple(dict.fromkeys(one for one in wanted if enabled[one])), [one for one in wanted if not enabled[one]]


def _seen(look: tuple[str, Callable[[], Iterator[Leftover]]]) -> list[Leftover] | str:
    """The resources that a look has found, or a line on why nobody can tell."""
    what, find = look
    try:
        with understood():
            return list(find())
    except GpuctlError as error:
        return f"{what}: {error.message}"


def _order(one: Leftover) -> tuple[str, float, str, str, str]:
    usd = math.inf if one.usd_per_hour is None else one.usd_per_hour
    return one.cluster, -usd, one.kind, one.region, one.id


# -- what has a region ------------------------------------------------------------------------------------------------


def _found(kind: Kind, client: Any, region: str, cluster: str | None) -> Iterator[Leftover]:
    wanted = {"Name": f"tag:{_TAG}", "Values": [cluster]} if cluster else {"Name": "tag-key", "Values": [_TAG]}
    for thing in _things(kind, client, {"Filters": [wanted]}):
        tags = _tags(thing.get("Tags") or thing.get("TagSet", ()))  # the latter on network interfaces alone
        if not _is_of(tags, cluster) or _state(thing) in kind.gone:
            continue
        told = (_state(thing) if key == "State" else thing.get(key, "") for key in kind.about)
        yield Leftover(
            **_told(tags),
            kind=kind.what,
            id=thing[kind.id],
            region=region,
            about=", ".join(str(word) for word in told if word),
            usd_per_hour=kind.usd(thing, region),
        )


def _things(kind: Kind, client: Any, asked: dict[str, Any]) -> Iterator[Answer]:
    pages = (
        client.get_paginator(kind.call).paginate(**asked)
        if client.can_paginate(kind.call)
        else [getattr(client, kind.call)(**asked)]
    )
    for page in pages:
        things: list[Answer] = [page]
        for key in kind.within:
            things = [inner for outer in things for inner in outer.get(key, ())]
        yield from things


def _tags(tags: Sequence[dict[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}


def _is_of(tags: dict[str, str], cluster: str | None) -> bool:
    return bool(tags.get(_TAG)) and cluster in (None, tags[_TAG])


def _told(tags: dict[str, str]) -> dict[str, Any]:
    """The owner that these tags tell (see ``StackRequest.tags``), as fields of ``Leftover``."""
    return {
        "cluster": tags[_TAG],
        "cluster_id": tags.get("gpuctl:id", ""),
        "owner": tags.get("gpuctl:owner", ""),
        "created": tags.get("gpuctl:created", ""),
    }


def _state(thing: Answer) -> str:
    state = thing.get("State", "")
    return str(state["Name"] if isinstance(state, dict) else state).lower()


def _instance_usd(thing: Answer, region: str) -> float | None:
    """An instance's price per hour; the spot price if it is one and that is known."""
    if _state(thing) not in ("pending", "running"):
        return 0.0
    for price in catalog().prices:
        if (price.type, price.region) == (thing["InstanceType"], region):
            spot = price.spot if thing.get("InstanceLifecycle") == "spot" else None
            return price.on_demand if spot is None else spot
    return None


def _volume_usd(thing: Answer, _: str) -> float | None:
    rate = VOLUME_USD_PER_GB_MONTH.get(thing["VolumeType"])
    return None if rate is None else rate * thing["Size"] / HOURS_A_MONTH


def _address_usd(_thing: Answer, _region: str) -> float:
    """The price of a public address, whether anything uses it or not: aws.amazon.com/vpc/pricing, "public IPv4
    address"."""
    return PUBLIC_ADDRESS_USD_PER_HOUR


def _nat_usd(thing: Answer, _: str) -> float:
    return 0.0 if _state(thing) == "failed" else NAT_USD_PER_HOUR


KINDS = (
    Kind(
        "instance",
        "describe_instances",
        ("Reservations", "Instances"),
        "InstanceId",
        ("terminated",),
        ("InstanceType", "State", "InstanceLifecycle"),
        _instance_usd,
    ),
    Kind("volume", "describe_volumes", ("Volumes",), "VolumeId", ("deleted",), ("VolumeType", "State"), _volume_usd),
    Kind("elastic IP", "describe_addresses", ("Addresses",), "AllocationId", (), ("PublicIp",), _address_usd),
    Kind("network interface", "describe_network_interfaces", ("NetworkInterfaces",), "NetworkInterfaceId"),
    Kind("placement group", "describe_placement_groups", ("PlacementGroups",), "GroupName", ("deleted",), ("State",)),
    Kind("launch template", "describe_launch_templates", ("LaunchTemplates",), "LaunchTemplateId"),
    Kind(
        "auto scaling group",
        "describe_auto_scaling_groups",
        ("AutoScalingGroups",),
        "AutoScalingGroupName",
        about=("Status",),
        service="autoscaling",
    ),
    Kind("security group", "describe_security_groups", ("SecurityGroups",), "GroupId", about=("GroupName",)),
    Kind(
        "instance connect endpoint",
        "describe_instance_connect_endpoints",
        ("InstanceConnectEndpoints",),
        "InstanceConnectEndpointId",
        ("delete-complete",),
        ("State",),
    ),
    Kind("VPC endpoint", "describe_vpc_endpoints", ("VpcEndpoints",), "VpcEndpointId", ("deleted",), ("ServiceName",)),
    Kind(
        "NAT gateway",
        "describe_nat_gateways",
        ("NatGateways",),
        "NatGatewayId",
        ("deleted",),
        ("State",),
        _nat_usd,
    ),
    Kind("internet gateway", "describe_internet_gateways", ("InternetGateways",), "InternetGatewayId"),
    Kind("subnet", "describe_subnets", ("Subnets",), "SubnetId", about=("AvailabilityZone",)),
    Kind("route table", "describe_route_tables", ("RouteTables",), "RouteTableId"),
    Kind("key pair", "describe_key_pairs", ("KeyPairs",), "KeyPairId", about=("KeyName",)),
    Kind("VPC", "describe_vpcs", ("Vpcs",), "VpcId", about=("CidrBlock",)),
)

# -- what has none ----------------------------------------------------------------------------------------------------


def _roles(client: Any, cluster: str | None) -> Iterator[Leftover]:
    for page in client.get_paginator("list_roles").paginate():
        for name in _ours(role["RoleName"] for role in page["Roles"]):
            tags = _unless_gone(client, "Role", partial(client.get_role, RoleName=name))
            yield from _named("role", name, tags, cluster)


def _profiles(client: Any, cluster: str | None) -> Iterator[Leftover]:
    for page in client.get_paginator("list_instance_profiles").paginate():
        for name in _ours(profile["InstanceProfileName"] for profile in page["InstanceProfiles"]):
            get = partial(client.get_instance_profile, InstanceProfileName=name)
            yield from _named("instance profile", name, _unless_gone(client, "InstanceProfile", get), cluster)


def _ours(names: Iterator[str]) -> Iterator[str]:
    """Lists tell no tags, and to ask for those of every role of a large account takes minutes."""
    return (name for name in names if name.startswith(OURS))


def _unless_gone(client: Any, key: str, get: Callable[[], Answer]) -> Sequence[dict[str, str]]:
    """A bucket's tags; ``None`` if it is gone."""
    try:
        tags: Sequence[dict[str, str]] = get()[key].get("Tags", ())
    except client.exceptions.NoSuchEntityException:
        return ()
    return tags


def _named(kind: str, name: str, listed: Sequence[dict[str, str]], cluster: str | None) -> Iterator[Leftover]:
    tags = _tags(listed)
    if _is_of(tags, cluster):
        yield Leftover(**_told(tags), kind=kind, id=name, region="")
