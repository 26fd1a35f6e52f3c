"""What a cloud's program is given: everything that ``gpuctl up`` has found out, and nothing that it must look up.

It travels as JSON in the stack's configuration (``gpuctl:request``), so plain ``pulumi preview`` in a checkout runs the
same program. ``examples/stack.yaml`` has one.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.machines import CloudName

CONFIG_KEY = "request"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
"""What all three clouds take as part of a name: a bucket's has 63 characters, a service account's 30."""


class StackRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one cluster."""

    cluster: str
    provider: CloudName
    type: str
    nodes_min: int
    nodes_max: int
    region: str
    zones: tuple[str, ...]
    """Where machines may be. One, unless somebody wants otherwise: traffic between zones costs money, and no fabric
    crosses them."""
    account: str = ""
    """Account, project or subscription; part of the bucket's name, which is the world's."""
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
    """URL of a bucket that is there already; empty: the program makes one."""
    owner: str = ""
    version: str = ""
    created: str = ""
    """Day, as YYYY-MM-DD."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.cluster):
            raise BadInput(
                f"{self.cluster!r} cannot name machines", "use up to 30 of a-z, 0-9 and -, a letter first, no - last"
            )
        if not 0 <= self.nodes_min <= self.nodes_max:
            raise BadInput(f"{self.nodes_min}:{self.nodes_max} is no number of nodes", "such as 2:4")
        if self.ssh_from:
            try:
                network = ipaddress.ip_network(self.ssh_from)
            except ValueError as error:
                raise BadInput(f"{self.ssh_from!r} is no network: {error}", "such as 203.0.113.7/32") from error
            if network.prefixlen == 0:
                raise BadInput(f"{self.ssh_from} is everybody", "name the network that you come from")

    def tags(self) -> dict[str, str]:
        """What every resource carries: ``down`` and ``leaks`` find by it what is left. GCP's and Azure's stricter forms
        are made from it where they are needed."""
        told = {
            "gpuctl:cluster": self.cluster,
            "gpuctl:version": self.version,
            "gpuctl:owner": self.owner,
            "gpuctl:created": self.created,
        }
        return {key: value for key, value in told.items() if value}
