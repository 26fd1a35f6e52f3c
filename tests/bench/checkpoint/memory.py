"""Host memory that a save and a restore need for a while."""

from __future__ import annotations

from tests.bench.checkpoint.contenders import BOTO, OURS
from tests.bench.checkpoint.field import Field, size_of
from tests.bench.settings import Settings
from tests.bench.table import Row

BAR_MIB = 256.0


def memory(field: Field, settings: Settings) -> list[Row]:
    """Of a save: beyond the state and one copy of it. Of a restore, in a process that was just started: beyond the
    state alone."""
    ours, theirs = (_peaks(field, settings, name) for name in (OURS, BOTO))
    copy = size_of(settings) / (1 << 20)
    notes = (f"its peak, without the state itself, was {ours[0]:.0f} MiB, one copy is {copy:.0f} MiB", "")
    return [
        Row(f"memory_{what} / {BOTO}", mine, reference, "MiB", f"<= {BAR_MIB:g} MiB", mine <= BAR_MIB, note)
        for what, mine, reference, note in (
            ("save", ours[0] - copy, theirs[0] - copy, notes[0]),
            ("restore", ours[1], theirs[1], notes[1]),
        )
    ]


def _peaks(field: Field, settings: Settings, name: str) -> tuple[float, float]:
    """MiB by which a process grew at most during its first save, and another one during its first restore."""
    place = field.server.place(name)
    with field.entrants([name], settings, place) as saving:
        saved = saving[name].ask("memory_of_save") / (1 << 20)
        with field.entrants([name], settings, place) as reading:
            return saved, reading[name].ask("memory_of_read") / (1 << 20)
