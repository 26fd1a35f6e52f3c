"""A DHCP server for machines, since clouds give addresses that way, and a machine that gives its lease back has none.

It keeps no leases: a machine's address is in its card's (``mac_of``). Sources: RFC 2131, RFC 2132.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading

_COOKIE = b"\x63\x82\x53\x63"
_OFFER, _ACK = 2, 5
_ANSWERS = {1: _OFFER, 3: _ACK}
"""To DHCPDISCOVER and DHCPREQUEST."""
_LEASE_S = 24 * 3600
_NETMASK, _ROUTER, _LEASE, _TYPE, _SERVER, _END = 1, 3, 51, 53, 54, 255
_HEADER = struct.Struct("!4sI8s4s4s4s16s192s")


def mac_of(address: str) -> str:
    """The card's address of the machine that is to have ``address``: a locally administered one."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(address).packed))


def listening(bridge: str) -> socket.socket:
    """The server's socket, of the network namespace that the caller is in."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge.encode())
    server.bind(("", 67))
    return server


def serve(server: socket.socket, gateway: str) -> None:
    """Answer in a thread until ``server`` is closed."""
    threading.Thread(target=_answer_all, args=(server, gateway), name="dhcp", daemon=True).start()


def _answer_all(server: socket.socket, gateway: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            packet, _ = server.recvfrom(2048)
            if answer := answered(packet, gateway):
                server.sendto(answer, ("255.255.255.255", 68))


def answered(packet: bytes, gateway: str) -> bytes:
    """What ``gateway`` says to a packet; nothing to one that asks for no address."""
    if len(packet) < _HEADER.size + 5 or packet[_HEADER.size : _HEADER.size + 4] != _COOKIE:
        return b""
    _, number, times, _, _, _, card, _ = _HEADER.unpack_from(packet)
    kind = _ANSWERS.get(_options(packet[_HEADER.size + 4 :]).get(_TYPE, b"\0")[0])
    if packet[0] != 1 or kind is None or card[:2] != b"\x02\x00":
        return b""
    here = socket.inet_aton(gateway)
    header = _HEADER.pack(b"\x02\x01\x06\x00", number, times, card[2:6], here, bytes(4), card, b"")
    told = {
        _TYPE: bytes([kind]),
        _SERVER: here,
        _LEASE: struct.pack("!I", _LEASE_S),
        _NETMASK: socket.inet_aton("255.255.255.0"),
        _ROUTER: here,
    }
    return header + _COOKIE + b"".join(bytes([name, len(value)]) + value for name, value in told.items()) + b"\xff"


def _options(data: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at + 1 < len(data) and data[at] != _END:
        if data[at] == 0:  # padding
            at += 1
            continue
        found[data[at]] = data[at + 2 : at + 2 + data[at + 1]]
        at += 2 + data[at + 1]
    return found
