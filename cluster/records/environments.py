"""What is written of the environments that jobs run in: their packages, and how nodes get them."""

from __future__ import annotations

from typing import Literal

import msgspec

EnvironmentKind = Literal["uv.lock", "pylock", "requirements", "conda"]


class EnvironmentSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In a job's spec: the file that says which packages its script needs. It comes to the nodes with the code."""

    kind: EnvironmentKind
    file: str
    """Path below the packed folder, with forward slashes."""
    digest: str
    """SHA-256 of that file and all that it refers to."""
    wheels: tuple[str, ...] = ()
    """Keys of the wheels given by ``--wheels``, the only ones that may be used if there are any."""


class PackedFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Files of an environment as one compressed archive."""

    sha256: str
    bytes: int


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``environments/built/<digest>/environment.json``: an environment that is in the bucket. Written last."""

    digest: str
    """Of the lock and of what it was built for, which name the environment."""
    file: str
    """What it was made from first, for people."""
    packages: dict[str, str]
    """Versions by name."""
    bytes: int
    """Unpacked."""
    files: int
    pack: PackedFiles
    """All but bytecode; paths in it are relative to the environment's folder."""
    bytecode: PackedFiles | None = None
    """What Python compiled for the first job that used it; ``None``: not yet."""
    python: str = ""
    platform: str = ""
    torch: str = ""
    """The node's own, on which it is layered; empty: it has its own, or there is none."""
    node: str = ""
    """Who built it."""
    built_at: float = 0.0


class ResolvedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``environments/requests/<digest>.json``: which environment a source means on nodes of one kind. Written once, so
    that a node that comes later gets what the first one got."""

    environment: str
    """Its digest."""


class EnvironmentBuild(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``environments/building/<request>.json``: who builds it. It saves the others the work, and decides nothing."""

    node: str
    incarnation: str
    beat: int
    """Keeps changing while that node builds."""
    address: str = ""
    """``host:port`` of its replica server, from which ``built`` can be fetched before it is in the bucket."""
    built: Environment | None = None
