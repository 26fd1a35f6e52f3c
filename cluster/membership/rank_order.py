"""Which node has which rank, where people have chosen some of them."""

from __future__ import annotations

from collections.abc import Sequence

from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import Member


def in_rank_order(order: Sequence[NodeRecord], size: int) -> list[NodeRecord]:
    """The first ``size`` nodes of ``order``, by rank: those that have chosen one have it, the others fill the gaps."""
    chosen = {record.rank: record for record in reversed(order) if record.rank is not None and record.rank < size}
    others = iter([record for record in order if record not in chosen.values()])
    ranked = [chosen.get(rank) or next(others, None) for rank in range(size)]
    return [record for record in ranked if record is not None]


def rank_clash(records: Sequence[NodeRecord]) -> str:
    """Who has chosen the same rank; empty if nobody has."""
    by_rank: dict[int, list[str]] = {}
    for record in records:
        if record.rank is not None:
            by_rank.setdefault(record.rank, []).append(f"{record.host or record.node} ({record.address})")
    return "; ".join(
        f"rank {rank} was chosen on {' and on '.join(hosts)}" for rank, hosts in by_rank.items() if len(hosts) > 1
    )


def members_of(chosen: Sequence[NodeRecord], nproc: int | None) -> tuple[Member, ...]:
    """The members of a round, in rank order. ``nproc``: workers a node; ``None``: as many as each has slots."""
    return tuple(
        Member(node=r.node, incarnation=r.incarnation, address=r.address, nproc=nproc or r.slots, tier_port=r.tier_port)
        for r in chosen
    )
