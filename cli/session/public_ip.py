"""The network that the user's traffic comes from, for ``--ssh-from me``."""

from __future__ import annotations

import http.client
import ipaddress
import os
import urllib.request

from gpuctl.cluster.errors import GpuctlError

STANDS_FOR_IT = "203.0.113.1/32"
"""In a plan, which is made offline: an address of nobody (RFC 5737)."""
_TOLD_BY = "https://checkip.amazonaws.com"
"""Amazon's own, which answers with nothing but the address that it is asked from."""


def my_network(url: str = "", timeout_s: float = 5.0) -> str:
    """Such as ``198.51.100.7/32``. ``GPUCTL_CHECKIP`` is who tells it, if it is somebody else. Raises ``GpuctlError``
    if that does not answer in time, or with no IPv4 address: nodes have no other."""
    url = url or os.environ.get("GPUCTL_CHECKIP") or _TOLD_BY
    hint = "give it yourself, for example --ssh-from 198.51.100.7/32"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            told = answer.read(100).decode("ascii", "replace").strip()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise GpuctlError(f"cannot find your public address at {url}: {error}", hint) from error
    try:
        return f"{ipaddress.IPv4Address(told)}/32"
    except ValueError as error:
        raise GpuctlError(f"{url} did not return an IPv4 address: {told[:40]!r}", hint) from error
