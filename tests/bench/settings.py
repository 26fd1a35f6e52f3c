"""What the command line of the bench settled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    root: Path
    """Scratch folder of this run, removed at its end."""
    runs: int
    """Measurements of each kind; the table shows their median."""
    fast: bool
    """Leave out the references that take a minute each."""
