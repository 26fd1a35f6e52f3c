"""Which rank made a round fail, and which only fell with it."""

from __future__ import annotations

from collections.abc import Mapping

from gpuctl.cluster.records.rounds import NodeExit, RankExit


def first_failure(exits: Mapping[str, NodeExit]) -> tuple[str, RankExit] | None:
    """(node, how it ended) of the rank to blame.

    A worker that died because a peer's connection broke is a victim, so ranks with another error come first; among
    equals the earliest counts (the clocks are those of the nodes, hence only a hint).
    """
    failed = [(name, rank) for name, node_exit in exits.items() for rank in node_exit.ranks if rank.exit_code != 0]
    return min(failed, key=lambda pair: (_is_victim(pair[1]), pair[1].at, pair[1].rank), default=None)


_VICTIM_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "Timed out waiting",
    "application timeout",
    "TCPStore",
    "DistNetworkError",
    "DistStoreError",
)


def _is_victim(rank: RankExit) -> bool:
    text = rank.message + rank.traceback
    # SIGTERM is how torchrun ends the others after the first failure.
    return rank.exit_code == 128 + 15 or any(sign in text for sign in _VICTIM_SIGNS)
