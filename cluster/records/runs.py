"""What is written of runs: nodes without a cluster that meet under an ID."""

from __future__ import annotations

import msgspec


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of an ID's ``runs/`` ledger, written by the first node of the run. Its version is the run's number."""

    nodes_min: int
    nodes_max: int
    key: str
    """Shared secret of the run's nodes (see ``shared_key``)."""
    max_restarts: int = 0
    launch: str = ""
    """How each node starts the command: ``--launcher jax --nproc 1``; empty: as it is."""
    begun_by: str = ""
    """Host of the first node."""
    begun_at: float = 0.0
    """Seconds since the epoch, by that node's clock."""
