"""The last checkpoint of a machine that is about to be taken: which one can still be had.

A save uploads only what has changed since the last checkpoint, so a new one costs what that takes. If it does not fit
into the time left beside the one that is on its way, that one makes room for it; and if it does not fit at all, the one
on its way is finished instead, and the steps since then are lost.
"""

from __future__ import annotations

from typing import Literal, get_args

Choice = Literal["both", "new", "flying"]
CHOICES: tuple[Choice, ...] = get_args(Choice)

_SAFETY = 0.8
"""Share of the time left that estimates may fill: the network may be slower now than it was for the saves before."""


def choose(left_s: float | None, new_s: float | None, flying_s: float | None) -> Choice:
    """``both``: let the save on its way finish, then write a new one; ``new``: call it off; ``flying``: only finish it.

    ``left_s`` is the time left (``None``: nobody has said), ``new_s`` what a new save is expected to take (``None``:
    none was made yet), ``flying_s`` what the one on its way still needs (``None``: there is none).
    """
    if flying_s is None:
        return "both"
    if left_s is None or (new_s is not None and new_s + flying_s <= _SAFETY * left_s):
        return "both"
    if new_s is None or new_s <= _SAFETY * left_s:
        return "new"
    return "flying" if flying_s < new_s else "new"
