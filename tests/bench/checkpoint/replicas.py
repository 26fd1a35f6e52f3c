"""Four ranks that all hold the same state: which part of it does each of them upload?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.bench.checkpoint import memory_guard
from tests.bench.checkpoint.contenders import DCP, OURS
from tests.bench.checkpoint.entrant import environment
from tests.bench.checkpoint.field import Field, size_of
from tests.bench.settings import Settings
from tests.bench.table import Row

RANKS = 4
BAR_POINTS = 3.0
_SCRIPT = Path(__file__).with_name("replica.py")
_PATIENCE_S = 180.0
_RANK_OF = {OURS: re.compile(r"/(\d{5})-\d{4}$"), DCP: re.compile(r"/__(\d+)_\d+\.distcp$")}
"""The rank that wrote an object, by the object's key."""


def four_ranks(field: Field, settings: Settings) -> list[Row]:
    """The share that is farthest from a quarter, in points of a hundred; by the sizes of what lies in the bucket."""
    ours, theirs = (_shares(field, settings, name) for name in (OURS, DCP))
    worst, reference = (max(abs(share - 100 / RANKS) for share in shares) for shares in (ours, theirs))
    note = f"each rank's share in %: {_shown(ours)}; {DCP}'s own deduplication {_shown(theirs)}; rank 0 alone 100 0 0 0"
    return [Row(f"four_ranks / {DCP}", worst, reference, "points", f"<= {BAR_POINTS:g}", worst <= BAR_POINTS, note)]


def _shares(field: Field, settings: Settings, name: str) -> list[float]:
    """In hundredths, by rank."""
    size = size_of(settings)
    memory_guard.check_memory(RANKS * (2 * size + (400 << 20)) + 3 * size)
    place = field.server.place(name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    arguments = (name, size, place.endpoint, place.bucket, place.prefix)
    subprocess.run(
        [*command, str(_SCRIPT), *map(str, arguments)],
        check=True,
        timeout=_PATIENCE_S,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env=environment(name, settings.root),
    )
    uploaded = dict.fromkeys(range(RANKS), 0)
    for key, bytes_ in place.sizes().items():
        if found := _RANK_OF[name].search(key):
            uploaded[int(found[1])] += bytes_
    place.clear()
    return [100 * bytes_ / sum(uploaded.values()) for bytes_ in uploaded.values()]


def _shown(shares: list[float]) -> str:
    return " ".join(f"{share:.1f}" for share in shares)
