"""What is written of a job before it runs."""

from __future__ import annotations

import msgspec

from gpuctl.cluster.records.environments import EnvironmentSource


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``jobs/<job>/spec.json``: what ``gpuctl train`` asked for."""

    job: str
    number: int
    """Position in line."""
    script: str
    """Path of the script, relative to the packed folder."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    code: str = ""
    """SHA-256 of the packed folder, kept at ``code/<digest>.tar.zst``."""
    nodes_min: int = 1
    nodes_max: int = 1
    nproc: int | None = None
    max_restarts: int = 0
    exit_timeout_s: float = 60.0
    """Once some ranks have ended: seconds that the others may be there and do nothing; 0: for ever."""
    image: str = ""
    """Container image that the workers run in; empty: the node itself."""
    environment: EnvironmentSource | None = None
    """The packages that the script needs besides the node's; ``None``: none, or they are the image's."""
    launcher: str = "torchrun"
    """What starts the workers on each node, as ``--launcher`` names it."""
    strategy: str = ""
    """What ranks exchange under ``gpuctl.Trainer``, as ``--strategy`` names it; empty: as the script says."""
    allow_tcp: bool = False
    """Begin although NCCL cannot use the fabric that the machines are sold with."""
    submitted_at: float = 0.0
    submitted_by: str = ""


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to cancel a job, ``jobs/<job>/cancel``."""

    now: bool = False
    """Cancel at once, without a last checkpoint."""
