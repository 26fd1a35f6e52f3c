"""Ports held for rounds."""

from __future__ import annotations

import socket

from gpuctl.bootstrap.ports import PortPool


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


def test_a_port_that_was_never_offered_is_not_given() -> None:
    pool = PortPool("127.0.0.1")
    try:
        assert pool.take(1) is None
    finally:
        pool.close()
