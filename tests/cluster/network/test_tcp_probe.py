"""Connections to ports that are open, shut, full and nowhere."""

from __future__ import annotations

import socket
import time

from gpuctl.cluster.network.tcp_probe import ProbeTarget, contacts


def test_open_and_shut_ports_are_told_apart_and_keep_their_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as closed:
        shut = closed.getsockname()[1]
        closed.close()
        found = contacts(
            [
                ProbeTarget("a", "127.0.0.1", shut, "agent"),
                ProbeTarget("b", "127.0.0.1", listening.getsockname()[1], "checkpoints"),
            ]
        )
        assert [(one.node, one.service, one.ok, one.why) for one in found] == [
            ("a", "agent", False, "refused"),
            ("b", "checkpoints", True, ""),
        ]
        assert found[1].took_ms is not None and found[1].took_ms < 1000
        accepted, _ = listening.accept()
        accepted.settimeout(5)
        try:
            assert accepted.recv(1) == b""  # nothing was said
        except ConnectionResetError:
            pass
        finally:
            accepted.close()


def test_all_who_do_not_answer_cost_one_patience_together() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(2)]
        for filler in fillers:  # nobody accepts: the kernel drops what comes after
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        target = ProbeTarget("a", "127.0.0.1", full.getsockname()[1], "agent")
        began = time.monotonic()
        found = contacts([target] * 20, patience_s=0.5)
        assert time.monotonic() - began < 2
        assert {one.why for one in found} == {"timed out"} and not any(one.ok for one in found)
        for filler in fillers:
            filler.close()


def test_nobody_to_ask_is_no_answer() -> None:
    assert contacts([]) == []
