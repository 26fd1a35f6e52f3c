"""The request that a cloud's program is given: everything that ``gpuctl up`` has found out, and nothing that it must
look up.

It travels as JSON in the stack's configuration (``gpuctl:request``), so plain ``pulumi preview`` in a checkout runs the
same program. ``examples/stack.yaml`` has one.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import time
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.bucket_names import parts_of
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.cluster.storage.store_options import plain_name
from gpuctl.stacks.catalog.instance_types import CloudName

CONFIG_KEY = "request"
_SCHEMES = {"aws": "s3", "gcp": "gs", "azure": "az"}
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
"""What all three clouds take as part of a name: a bucket's has 63 characters, a service account's 30."""
_AS_IT_IS = "/!'()+,:;=@~"
"""Of a prefix, in a URL."""
_PREFIX = re.compile(r"[A-Za-z0-9/!'()+,.:;=@_~ -]*")
"""What stands for itself in the rules by which nodes are let into a prefix: in AWS's ``*`` and ``?`` are for any others
and ``${`` begins a variable, in Google's a quote ends the text."""


def new_cluster_id() -> str:
    """Ten hex digits, at random."""
    return secrets.token_hex(5)


def today() -> str:
    """The day, in UTC, as ``StackRequest.created`` has it."""
    return time.strftime("%Y-%m-%d", time.gmtime())


class BucketLocation(NamedTuple):
    """A cluster's prefix in a bucket."""

    name: str
    prefix: str
    """Of the cluster, in it."""
    options: dict[str, str]
    """Of the URL, such as the region."""


class StackRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that a cluster's stack is made from."""

    cluster: str
    provider: CloudName
    type: str
    nodes_min: int
    nodes_max: int
    region: str
    zones: tuple[str, ...] = ()
    """Where machines may be. One, unless somebody wants otherwise: traffic between zones costs money, and no fabric
    crosses them. None: whichever has machines, to be chosen before AWS or Google is asked for any. Azure names them 1,
    2, 3, and has regions and sizes without any."""
    account: str = ""
    """Account, project or subscription. Nothing is created in another one, if it is given; part of the bucket's name,
    which is the world's."""
    spot: bool = True
    placement: bool = True
    """Machines side by side, where the type has a fabric."""
    ssh_from: str = ""
    """Network that may reach the nodes' SSH, such as ``203.0.113.7/32``; empty: none."""
    ssh_key: str = ""
    """Public key that may log in."""
    disk_gb: int = 200
    image: str = ""
    """Empty: the cloud's own GPU image, looked up once and then kept."""
    user_data: str = ""
    """What cloud-init is given, before it is compressed."""
    bucket: str = ""
    """URL of a bucket that is there already, such as one that ``down`` has left; empty: the program makes one."""
    bucket_group: str = ""
    """Azure: the resource group of the account in ``bucket``; empty: the one that this program would have made."""
    lets_in: bool = False
    """Azure: ``bucket`` is one that an earlier stack made, and ``reader`` has no role in it yet."""
    reader: str = ""
    """Azure: who reads the bucket besides the nodes, as ``User:<object id>`` or ``ServicePrincipal:<object id>``;
    empty: the user who is logged in."""
    id: str = ""
    """The cluster's identity, made once by ``new_cluster_id``: in its record in the bucket and in every tag. Names can
    be chosen twice; this cannot."""
    owner: str = ""
    """Who made it, as ``user@host``."""
    version: str = ""
    created: str = ""
    """Day, as YYYY-MM-DD."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.cluster):
            raise BadInput(
                f"{self.cluster!r} cannot name machines", "use up to 30 of a-z, 0-9 and -, a letter first, no - last"
            )
        if self.provider == "azure" and self.cluster.endswith("-kept"):
            raise BadInput(f"{self.cluster!r} is reserved for buckets that gpuctl keeps", "use another name")
        if not 0 <= self.nodes_min <= self.nodes_max:
            raise BadInput(f"{self.nodes_min}:{self.nodes_max} is not a number of nodes", "for example 2:4")
        if self.ssh_from:
            try:
                network = ipaddress.ip_network(self.ssh_from)
            except ValueError as error:
                raise BadInput(f"{self.ssh_from!r} is not a network: {error}", "for example 203.0.113.7/32") from error
            if network.version != 4:
                raise BadInput(f"{self.ssh_from} is IPv6, but nodes have IPv4 only", "for example 203.0.113.7/32")
            if network.prefixlen == 0:
                raise BadInput(f"{self.ssh_from} allows everybody", "give the network you connect from")
            # With its mask: AWS takes no 203.0.113.7 for a network, and says so half-way through.
            msgspec.structs.force_setattr(self, "ssh_from", str(network))
        if self.bucket:
            self.given_bucket()

    def tags(self) -> dict[str, str]:
        """The tags of every resource: ``down`` and ``leaks`` find by them what is left. GCP's and Azure's stricter
        forms are made from them where they are needed."""
        told = {
            "gpuctl:cluster": self.cluster,
            "gpuctl:id": self.id,
            "gpuctl:version": self.version,
            "gpuctl:owner": self.owner,
            "gpuctl:created": self.created,
        }
        return {key: value for key, value in told.items() if value}

    def named(self, most: int) -> str:
        """``gpuctl-<cluster>``; where that has more than ``most`` characters, its beginning and a part of ``mark``."""
        whole = f"gpuctl-{self.cluster}"
        return whole if len(whole) <= most else f"{whole[: most - 7].rstrip('-')}-{self.mark()[:6]}"

    def mark(self) -> str:
        """Ten hex digits that tell this cluster's names from all others in the world; the same every time."""
        said = "/".join((self.provider, self.account, self.region, self.cluster))
        return hashlib.sha256(said.encode()).hexdigest()[:10]

    def account_name(self) -> str:
        """Azure: of the storage account that is made, up to 24 of a-z and 0-9."""
        return f"gpuctl{self.cluster.replace('-', '')[:8]}{self.mark()}"

    def place(self) -> BucketLocation:
        """The location of the cluster's state: in ``bucket``, or in the one that the program makes. Known before that
        is there, since the machines are told of it."""
        if self.bucket:
            return self.given_bucket()
        made = f"gpuctl-{self.cluster}-{self.mark()}"
        match self.provider:
            case "aws":
                return BucketLocation(made, self.cluster, {"region": self.region})
            case "gcp":
                return BucketLocation(made, self.cluster, {})
            case "azure":
                return BucketLocation("gpuctl", self.cluster, {"account_name": self.account_name()})

    def where(self) -> str:
        """Its zones, or its region, for people."""
        return ", ".join(self.zones) or self.region

    def bucket_url(self) -> str:
        """The URL of ``place``, as ``storage.bucket`` takes it."""
        name, prefix, options = self.place()
        query = f"?{urlencode(options)}" if options else ""
        return f"{_SCHEMES[self.provider]}://{name}/{quote(prefix, safe=_AS_IT_IS)}{query}"

    def is_own(self, url: str) -> bool:
        """Whether ``url`` is of the bucket that the program makes where none is given."""
        return url == msgspec.structs.replace(self, bucket="").bucket_url()

    def given_bucket(self) -> BucketLocation:
        """``bucket`` in its parts; the cluster gets a prefix of its own if none is named. Raises ``BadInput``."""
        scheme = _SCHEMES[self.provider]
        parts = urlsplit(self.bucket)
        options = {plain_name(scheme, name.lower()): value for name, value in parse_qsl(parts.query)}
        if parts.scheme != scheme or not parts.netloc:
            raise BadInput(
                f"{shown(self.bucket)!r} is not a bucket of {self.provider}", f"for example {scheme}://bucket/prefix"
            )
        if self.provider == "azure" and "account_name" not in options:
            raise BadInput(f"{shown(self.bucket)!r} names no storage account", "add ?account_name=…")
        if self.provider == "aws":
            options = {"region": self.region} | options
        prefix = unquote(parts_of(self.bucket).path).strip("/")
        if not _PREFIX.fullmatch(prefix):
            raise BadInput(
                f"{shown(self.bucket)!r} has a prefix that nodes cannot be given rights to",
                "use letters, digits, dashes, dots and underscores",
            )
        return BucketLocation(parts.netloc, prefix or self.cluster, options)
