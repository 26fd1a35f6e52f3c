"""IP addresses, as sockets need them."""

from __future__ import annotations

import socket


def family_of(address: str) -> socket.AddressFamily:
    """The address family of a numeric IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
