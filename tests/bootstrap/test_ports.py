"""Ports held for rounds."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys

import pytest

from gpuctl.bootstrap.ports import PortPool, reserved
from tests.waiting import PATIENCE_S


def test_a_port_is_listening_before_it_is_offered_and_is_given_once() -> None:
    pool = PortPool("127.0.0.1", size=2)
    try:
        port = pool.offered()[0]
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            taken = pool.take(port)
        assert taken is not None and taken.getsockname()[1] == port
        assert pool.take(port) is None
        taken.close()
        assert port not in pool.offered() and len(pool.offered()) == 2
    finally:
        pool.close()


def test_ports_are_held_at_an_address_of_ipv6_too() -> None:
    pool = PortPool("::1", size=1)
    try:
        with socket.create_connection(("::1", pool.offered()[0]), timeout=2):
            taken = pool.take(pool.offered()[0])
        assert taken is not None
        with reserved(taken) as keeper:
            assert keeper.getsockname()[0] == "::1"
    finally:
        pool.close()


def test_a_round_gets_its_port_where_no_other_can_be_opened() -> None:
    pool = PortPool("127.0.0.1", size=2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        port, other = pool.offered()
        taken = pool.take(port)
        assert taken is not None and pool.offered() == (other,)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        pool.close()
    taken.close()


_FOUR_PORTS = """
    ip link set lo up && echo 40000 40003 > /proc/sys/net/ipv4/ip_local_port_range && exec "$0" -c "$1"
"""
_THREE_TAKEN = """
import socket
from gpuctl.bootstrap.ports import PortPool
taken = [socket.create_server(("127.0.0.2", port)) for port in (40000, 40001, 40003)]
for _ in range(20):
    pool = PortPool("127.0.0.1", size=1)
    print(*pool.offered())
    pool.close()
"""


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("ip"), reason="network namespaces need root, iproute2 and util-linux"
)
def test_a_port_that_somebody_has_at_another_address_is_not_offered() -> None:
    """torch's store and JAX's coordinator listen at all addresses."""
    command = ["unshare", "--net", "sh", "-c", _FOUR_PORTS, sys.executable, _THREE_TAKEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["40002"] * 20, done.stderr


def test_a_port_that_was_never_offered_is_not_given() -> None:
    pool = PortPool("127.0.0.1")
    try:
        assert pool.take(1) is None
    finally:
        pool.close()


def test_a_reserved_port_is_given_to_nobody_but_who_names_it() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    with reserved(listening):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        # As torch's store does, on all addresses and with their reuse allowed.
        with socket.create_server(("", address[1])), socket.create_connection(address, timeout=5):
            pass
