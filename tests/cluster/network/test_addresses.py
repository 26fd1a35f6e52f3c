"""IP addresses, as sockets need them."""

from __future__ import annotations

import socket

import pytest

from gpuctl.cluster.network.addresses import family_of


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_socket_of_its_family_can_be_bound_to_it(address: str) -> None:
    with socket.socket(family_of(address)) as one:
        one.bind((address, 0))
        assert one.getsockname()[0] == address
