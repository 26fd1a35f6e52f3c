"""The history of a job, put together from its ledger, its nodes' exits and its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuctl.cluster.records.rounds import NodeExit, Round


@dataclass(frozen=True, slots=True)
class Point:
    """One record of the metrics stream: step ``step`` is done, at wall-clock second ``at``."""

    round: int
    step: int
    at: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class RoundSpan:
    """The steps trained in one round."""

    number: int
    nodes: int
    reason: str
    """Why this round began."""
    first: Point
    last_step: int
    """The last optimizer step any node of the round finished."""
    last_at: float
    """Wall-clock second of the last record, at or before that step."""
    steps_per_s: float | None
    """From the first record to the last; ``None`` of a single one."""


def round_spans(history: Sequence[Round], exits: Iterable[NodeExit], points: Sequence[Point]) -> list[RoundSpan]:
    """The rounds that came as far as an optimizer step, in order."""
    furthest: dict[int, int] = {}
    for node_exit in exits:
        furthest[node_exit.round] = max(furthest.get(node_exit.round, 0), node_exit.last_step or 0)
    began: Mapping[int, Round] = {r.number: r for r in reversed(history) if r.phase == "run"}
    found = []
    for number, round_ in sorted(began.items()):
        mine = [point for point in points if point.round == number]
        if not mine:
            continue
        first, last = (end(mine, key=lambda point: point.step) for end in (min, max))
        found.append(
            RoundSpan(
                number=number,
                nodes=len(round_.members),
                reason=round_.reason,
                first=first,
                last_step=max(last.step, furthest.get(number, 0)),
                last_at=last.at,
                steps_per_s=(last.step - first.step) / (last.at - first.at) if last.at > first.at else None,
            )
        )
    return found


def redone(before: RoundSpan, after: RoundSpan) -> int:
    """Optimizer steps made twice because of what lies between the two."""
    return max(0, before.last_step + 1 - after.first.step)


def kept(points: Sequence[Point]) -> list[Point]:
    """The points of the run as it turned out: of a step made twice, the later one, in order of steps."""
    return [point for _, point in sorted({point.step: point for point in points}.items())]
