"""What a node learns when a round begins: its rank, rank 0's address, and its own towards it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpuctl.bootstrap.rendezvous.own_address import towards
from gpuctl.cluster.records.rounds import Round

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that people may have set, and that stay then."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A node's place in a round. With one process a node, ``rank`` and ``world_size`` are also the process's."""

    id: str
    round: int
    """1 for the first; each loss, and each node that joins, begins another."""
    rank: int
    world_size: int
    """Number of nodes."""
    master_address: str
    """Rank 0's address."""
    master_port: int
    """A port on rank 0 that is free for a rendezvous."""
    local_address: str
    """This node's own address, on the interface that reaches rank 0."""
    interface: str
    """Name of that interface; empty if it is not known."""
    local_rank: int
    """Place among the nodes of the run that have the same address, as several shells of one machine have."""
    local_world_size: int
    nodes: tuple[str, ...]
    """Names of all nodes, by rank."""
    hosts: tuple[str, ...]
    """Their addresses."""

    def variables(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """What launchers and ``init_method="env://"`` read.

        ``PET_…`` are torchrun's own, so that it needs no flags. A network interface that ``env`` names already stays.
        """
        found = {
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.rank),
            "NNODES": str(self.world_size),
            "PET_NNODES": str(self.world_size),
            "PET_NODE_RANK": str(self.rank),
            "PET_MASTER_ADDR": self.master_address,
            "PET_MASTER_PORT": str(self.master_port),
            "LOCAL_ADDR": self.local_address,
            "GPUCTL_NODE_ADDRESSES": ",".join(self.hosts),
            "MINGLE_ID": self.id,
            "MINGLE_ROUND": str(self.round),
        }
        if self.interface:
            found |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": f"={self.interface}"}
        given = env or {}
        return {name: value for name, value in found.items() if name not in INTERFACES or not given.get(name)}


def placement_of(round_: Round, rank: int) -> Placement:
    """The place of the member of this ``rank`` in a round that runs."""
    own = round_.members[rank].address
    here = [other for other, member in enumerate(round_.members) if member.address == own]
    local_address, interface = towards(round_.master_address, own)
    return Placement(
        id=round_.job,
        round=round_.number,
        rank=rank,
        world_size=len(round_.members),
        master_address=round_.master_address,
        master_port=round_.master_port,
        local_address=local_address,
        interface=interface,
        local_rank=here.index(rank),
        local_world_size=len(here),
        nodes=tuple(member.node for member in round_.members),
        hosts=tuple(member.address for member in round_.members),
    )
