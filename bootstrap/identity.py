"""Who a node is: the few facts its agent is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from gpuctl.cluster.records.codec import decode

FILE = "identity.json"


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who a node is: ``<dir>/identity.json``, written by whatever created the node."""

    node: str
    address: str
    bucket: str
    """URL of the cluster's prefix."""
    env: dict[str, str] = {}
    """Variables for the workers of every job on this node (network interface, threads)."""
    notice_s: float = 30.0
    """Seconds between SIGTERM and the end: of a rented machine, those that its cloud gives a shutdown."""
    promised_s: float = 30.0
    """Seconds between the cloud's own notice and the end, where that names no time (Google's)."""
    provider: str = ""
    """Whose machine this is (``node_spec.Host``), and so who gives notice of its end; empty: a process of ``local``."""
    root: str = "/"
    """With a provider: where ``/run/gpuctl`` is; elsewhere in tests."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ``CorruptRecord``, and ``OSError`` where there is none."""
        path = folder / FILE
        return decode(path.read_bytes(), cls, str(path))

    @staticmethod
    def was_deleted(folder: Path) -> bool:
        """Whether there is none any more. A disk that does not answer has lost nothing yet."""
        try:
            (folder / FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False
