"""Work for unlike machines: how fast each worker is, and the part that it takes."""

from __future__ import annotations

from collections.abc import Sequence

_WEIGHT = 0.5
"""Of what was measured last."""


def updated(before: Sequence[float], steps: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Steps a second of each worker: a moving average, in which a measurement weighs half as much with each one that
    follows. ``before`` is empty at first. A worker that made no step stays as fast as it was.

    >>> updated([2.0, 2.0], [10, 0], [10.0, 0.0])
    [1.5, 2.0]
    """
    found = []
    for index, (made, took) in enumerate(zip(steps, seconds, strict=True)):
        old = before[index] if before else 0.0
        now = made / took if made and took > 0 else old
        found.append(now if not old else old + _WEIGHT * (now - old))
    return found


def shares(total: int, speeds: Sequence[float]) -> list[int]:
    """``total`` steps, divided in proportion to ``speeds``, at least one each where there are enough: what is left by
    rounding down goes to the largest remainders, and the first of equals.

    >>> shares(100, [1.0, 1.0, 2.0])
    [25, 25, 50]
    """
    workers = len(speeds)
    if total < workers or not all(speed > 0 for speed in speeds):
        return [total // workers + (worker < total % workers) for worker in range(workers)]
    exact = [total * speed / sum(speeds) for speed in speeds]
    found = [max(1, int(part)) for part in exact]
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    order = sorted(range(workers), key=lambda worker: (found[worker] - exact[worker], worker))
    for worker in order[: total - sum(found)]:
        found[worker] += 1
    return found
