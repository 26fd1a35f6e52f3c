"""Who is here and who is waited for, in words: a line whenever that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuctl.bootstrap.rendezvous.participant import Participant
from gpuctl.bootstrap.rendezvous.runs import Run
from gpuctl.cluster import layout
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import Round

_NAMED = 8
"""Nodes in a line; of more, only the number is told."""


class Progress:
    """Tells of one run, each thing once."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self._told: dict[str, str] = {}

    def tell(self, node: Participant) -> None:
        """What is new since the last call."""
        for line in node.trouble:
            self._once(line.partition(" (")[0], f"warning: {line}")
        round_ = node.round
        runs = round_ is not None and round_.phase in ("run", "drain")
        if runs and round_ is not None:
            self._once("round", _of_round(self._run, round_, node.node))
        elif round_ is not None and round_.phase == "wait" and round_.number:
            self._once("round", f"round {round_.number} of {self._run.name}: {round_.reason}")
        if not runs:
            self._once("here", self._of_waiting(node.here))

    def _of_waiting(self, here: Sequence[str]) -> str:
        least, most = self._run.spec.nodes_min, self._run.spec.nodes_max
        wanted = f"{most}" if least == most else f"{least} to {most}"
        return f"{len(here)} of {wanted} are here: {named(here)}"

    def _once(self, what: str, line: str) -> None:
        if self._told.get(what) != line:
            self._told[what] = line
            self._say(line)


def named(nodes: Sequence[str]) -> str:
    more = len(nodes) - _NAMED
    return ", ".join(nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def missing(run: Run) -> str:
    """Who has come and who has not, from the bucket: what is told when the time is over."""
    nodes = []
    for entry in run.store.list(layout.NODES):
        try:
            nodes.append(decode(run.store.get(entry.key) or b"", NodeRecord, entry.key))
        except CorruptRecord:
            continue
    hosts = [f"{node.host or node.node} ({node.address})" for node in nodes]
    chosen = {node.rank for node in nodes if node.rank is not None}
    lacking = run.spec.nodes_min - len(nodes)
    said = f"{len(nodes)} of {run.spec.nodes_min} came: {named(hosts)}"
    if chosen and len(chosen) == len(nodes):
        ranks = [str(rank) for rank in range(run.spec.nodes_min) if rank not in chosen]
        return f"{said}; missing: rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    return f"{said}; missing: {max(lacking, 0)}"


def _of_round(run: Run, round_: Round, node: str) -> str:
    names = [member.node for member in round_.members]
    if round_.phase == "drain":
        return f"round {round_.number} of {run.name} is ending: {round_.reason}"
    place = f"rank {names.index(node)} of {len(names)}" if node in names else f"a spare beside {len(names)}"
    return f"round {round_.number} of {run.name}: this is {place}, rank 0 is {names[0]} ({round_.reason})"
