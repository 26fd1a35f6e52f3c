"""By which address a node is reached, and by which interface it reaches another."""

from __future__ import annotations

import psutil
import pytest

from gpuctl.bootstrap.rendezvous.own_address import own_address, towards
from gpuctl.cluster.errors import BadInput

LOOPBACK = next(name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "[::1]"])
def test_an_address_of_this_machine_is_told_as_it_is(address: str) -> None:
    assert own_address(address) == address.strip("[]")


def test_an_interface_stands_for_its_address() -> None:
    assert own_address(interface=LOOPBACK) == "127.0.0.1"


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_another_machine_is_refused_with_those_that_there_are(address: str) -> None:
    with pytest.raises(BadInput, match=rf"does not have the address {address}; it has .*{LOOPBACK} \(127.0.0.1\)"):
        own_address(address)


@pytest.mark.parametrize("address", ["", "my-host", "10.0.0", "10.0.0.1/24"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match=f"{address!r} is not an IP address"):
        own_address(address)


def test_an_interface_that_is_not_there_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadInput, match=rf"unknown interface 'eth77'; this machine has .*{LOOPBACK} \(127.0.0.1\)"):
        own_address(interface="eth77")


def test_the_interface_towards_rank_0_is_that_of_the_route() -> None:
    """Whatever address this node has told the others."""
    assert towards("127.0.0.1", "203.0.113.7") == ("127.0.0.1", LOOPBACK)


def test_rank_0_itself_has_the_address_that_it_has_told() -> None:
    assert towards("127.0.0.1", "127.0.0.1") == ("127.0.0.1", LOOPBACK)
