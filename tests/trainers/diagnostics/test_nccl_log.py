"""What is read out of NCCL's logs (see ``nccl/README.md`` for where they are from)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster.network.verification import Transport
from gpuctl.trainers.diagnostics import nccl_log

LOGS = Path(__file__).with_name("nccl")


def transport(log: str) -> Transport:
    return nccl_log.transport(log, {})


FOUND = {
    "efa": ("efa", True, "ens32"),
    "efa-new": ("efa", True, "enp71s0"),
    "efa-without-device": ("socket", False, "eth0"),
    "efa-over-tcp": ("libfabric/tcp;ofi_rxm", False, "eth0"),
    "no-plugin": ("socket", False, "eth0"),
    "infiniband": ("infiniband", True, "eth0"),
    "infiniband-2.4": ("infiniband", False, "ib0"),
    "roce": ("roce", False, "enp225s0f1"),
    "gvnic": ("socket", False, "eth0"),
    "one-machine": ("", False, "eth0"),
    "one-rank-2.28": ("socket", False, "eth0"),
}
"""Log to network, GPUDirect and interface."""


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_the_network_is_the_one_that_was_used(path: Path) -> None:
    found = transport(path.read_text())
    assert (found.network, found.gdr, found.interface) == FOUND[path.stem]


@pytest.mark.parametrize(
    ("name", "clue"),
    [
        ("efa-without-device", "libfabric found no EFA device"),
        ("efa-over-tcp", "set FI_PROVIDER=efa"),
        ("no-plugin", "NCCL_IB_DISABLE=1 is set"),
        ("gvnic", "no InfiniBand device"),
    ],
)
def test_the_likeliest_cause_of_a_slower_network_comes_first(name: str, clue: str) -> None:
    assert clue in transport(_log(name)).clues[0]


def test_what_is_set_is_known_where_nccl_does_not_tell() -> None:
    found = nccl_log.transport(_log("one-rank-2.28"), {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "0"})
    assert found.clues[0] == "NCCL_NET=Socket is set: unset it"
    assert not any("NCCL_IB_DISABLE" in clue for clue in found.clues)


def test_without_the_plug_in_that_is_said_too() -> None:
    assert any("libnccl-net.so" in clue for clue in transport(_log("no-plugin")).clues)


@pytest.mark.parametrize("name", ["efa", "efa-new", "infiniband"])
def test_a_fast_network_needs_no_explanation(name: str) -> None:
    assert transport(_log(name)).clues == ()


def test_one_worker_on_tcp_among_fast_ones_is_not_overlooked() -> None:
    found = transport(_log("efa") + _log("efa-without-device"))
    assert found.network == "socket" and not found.gdr


def test_a_log_that_says_nothing_says_nothing() -> None:
    assert transport("").network == "" and transport("NCCL version 2.21.5+cuda12.4\n").network == ""


def _log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()
