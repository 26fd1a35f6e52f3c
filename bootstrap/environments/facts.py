"""What an environment depends on besides its source: the node's Python, platform and torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from dataclasses import dataclass

import msgspec

from gpuctl import __version__
from gpuctl.cluster import distribution
from gpuctl.cluster.records.environments import EnvironmentSource

_LAYOUT = 1
"""Of the archives and of what is put beside them; another one makes other environments."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Nodes for which these are the same can share an environment."""

    python: str
    """Such as ``cpython-3.11``."""
    platform: str
    """Such as ``linux-x86_64-glibc2.36``."""
    torch: str
    """Version of the node's torch, with its local label; empty: it has none."""
    needs: tuple[str, ...]
    """What gpuctl itself needs, which runs in the environment as well: requirements as its package has them."""

    @classmethod
    def of_this_node(cls) -> NodeFacts:
        libc = "".join(platform.libc_ver())
        return cls(
            python=f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}",
            platform="-".join(filter(None, (sys.platform, platform.machine(), libc))),
            torch=_version("torch"),
            needs=_needs(),
        )

    @property
    def own_packages(self) -> dict[str, str]:
        """The packages that stay the node's own, with their versions as an index has them."""
        return {distribution.NAME: __version__, **({"torch": self.torch_release} if self.torch else {})}

    @property
    def torch_release(self) -> str:
        """Its version as an index has it, without the label."""
        return self.torch.partition("+")[0]

    def request_of(self, source: EnvironmentSource) -> str:
        """The digest of all that decides what ``source`` means here."""
        asked = [_LAYOUT, source.kind, source.digest, sorted(source.wheels), *self._all()]
        return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()

    def environment_of(self, packages: list[tuple[str, str, list[str]]]) -> str:
        """The digest of an environment with these packages (name, version, hashes of its wheels)."""
        asked = [_LAYOUT, sorted(packages), self.python, self.platform, self.torch]
        return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()

    def _all(self) -> list[object]:
        return [self.python, self.platform, self.torch, list(self.needs)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _needs() -> tuple[str, ...]:
    """Those of a node: gpuctl's own and the extra ``train``, but for torch, whose version the node decides."""
    from packaging.requirements import Requirement

    found = []
    for text in importlib.metadata.requires(distribution.NAME) or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": "train"})
        if wanted and requirement.name not in ("torch", distribution.NAME):
            found.append(f"{requirement.name}{requirement.specifier}")
    return tuple(sorted(found))
