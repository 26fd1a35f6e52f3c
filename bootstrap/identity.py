"""Who a node is: the few facts its agent is started with."""

from __future__ import annotations

import msgspec


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``<dir>/identity.json``: who a node is, written by whatever made it."""

    node: str
    address: str
    bucket: str
    """URL of the cluster's prefix."""
    env: dict[str, str] = {}
    """Variables for the workers of every job on this node (network interface, threads)."""
    notice_s: float = 30.0
    """Seconds between SIGTERM and the end."""
    promised_s: float = 30.0
    """Seconds between the cloud's own notice and the end, where that names no time (Google's)."""
    provider: str = ""
    """Whose machine this is (``node_spec.Host``), and so who gives notice of its end; empty: a process of ``local``."""
    root: str = "/"
    """With a provider: where ``/run/gpuctl`` is; elsewhere in tests."""
