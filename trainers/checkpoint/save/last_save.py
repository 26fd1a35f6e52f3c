"""The last checkpoint of a machine that is about to be taken: which one can still be had.

A save uploads only what has changed since the last checkpoint, so a new one costs what that takes. If it does not fit
into the time left beside those that are on their way, they make room for it; and if it does not fit at all, they are
finished instead, and the steps since then are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

Choice = Literal["both", "new", "finish"]
CHOICES: tuple[Choice, ...] = get_args(Choice)

_SAFETY = 0.8
"""Share of the time left that estimates may fill: the network may be slower now than it was for the saves before."""


def choose(left_s: float | None, new_s: float | None, in_flight_s: Sequence[float]) -> Choice:
    """``both``: let the saves on their way finish, then write a new one; ``new``: call them off; ``finish``: only
    finish them.

    ``left_s`` is the time left (``None``: nobody has said), ``new_s`` what a new save is expected to take (``None``:
    none was made yet, and the first one has not come far enough to tell; its head start is worth more than the steps
    since), ``flying_s`` what each of those on their way still needs, one after the other.
    """
    if not in_flight_s:
        return "both"
    if left_s is None or new_s is None or new_s + sum(in_flight_s) <= _SAFETY * left_s:
        return "both"
    if new_s <= _SAFETY * left_s:
        return "new"
    return "finish" if in_flight_s[0] < new_s else "new"
