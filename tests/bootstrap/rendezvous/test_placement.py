"""What a node learns of a round."""

from __future__ import annotations

import pytest

from gpuctl.bootstrap.rendezvous.placement import Placement, placement_of
from gpuctl.cluster.records.rounds import Member, Round


def place(rank: int, *addresses: str) -> Placement:
    members = tuple(
        Member(node=f"n{at}", incarnation="1", address=address, nproc=1) for at, address in enumerate(addresses)
    )
    return placement_of(
        Round(
            job="exp1",
            number=3,
            phase="run",
            epoch=1,
            members=members,
            master_address=addresses[0],
            master_port=4567,
        ),
        rank,
    )


def test_launchers_find_all_that_they_need() -> None:
    found = place(1, "127.0.0.1", "127.0.0.2", "127.0.0.3").variables()
    assert found == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4567",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
        "NNODES": "3",
        "PET_NNODES": "3",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "4567",
        "LOCAL_ADDR": found["LOCAL_ADDR"],
        "GPUCTL_NODE_ADDRESSES": "127.0.0.1,127.0.0.2,127.0.0.3",
        "MINGLE_ID": "exp1",
        "MINGLE_ROUND": "3",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert found["LOCAL_ADDR"].startswith("127.0.0.")


@pytest.mark.parametrize(("rank", "local"), [(0, (0, 3)), (1, (0, 1)), (2, (1, 3)), (3, (2, 3))])
def test_several_on_one_machine_are_counted_there(rank: int, local: tuple[int, int]) -> None:
    found = place(rank, "127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.1")
    assert (found.local_rank, found.local_world_size) == local


def test_an_interface_that_somebody_has_chosen_stays() -> None:
    found = place(0, "127.0.0.1").variables({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "", "RANK": "9"})
    assert "NCCL_SOCKET_IFNAME" not in found
    assert (found["GLOO_SOCKET_IFNAME"], found["RANK"]) == ("lo", "0")
