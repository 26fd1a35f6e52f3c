"""The variables of every type of every cloud."""

from __future__ import annotations

import pytest

from gpuctl.bootstrap.network.nccl_env import (
    CUDART,
    OFI_PLUGINS,
    TOPOLOGIES,
    NetworkHardware,
    Variable,
    fabric_env,
    traffic_interface,
)
from gpuctl.cluster.network.records import Address, CardKind, Gateway, Interface, RdmaDevice, Scope
from gpuctl.stacks.catalog.instance_types import MachineType, catalog

_ALL = catalog().types
_SOCKETS = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
_EFA = {"FI_PROVIDER", "FI_EFA_FORK_SAFE", "FI_EFA_USE_HUGE_PAGE", "LD_LIBRARY_PATH"}


def _interface(name: str, address: str = "", *, up: bool = True, virtual: bool = False) -> Interface:
    scope: Scope = "loopback" if address.startswith("127.") else "private"
    addresses = (Address(address=address, prefix=8 if scope == "loopback" else 24, scope=scope),) if address else ()
    return Interface(name=name, up=up, virtual=virtual, addresses=addresses)


INTERFACES = (
    _interface("docker0", "172.17.0.1", virtual=True),
    _interface("ens33", "10.0.1.9"),
    _interface("ens32", "10.0.0.4"),
    _interface("ens34"),
    _interface("lo", "127.0.0.1", virtual=True),
)
GATEWAYS = (Gateway(address="10.0.0.1", interface="ens32"),)


def _as_sold(machine: MachineType) -> NetworkHardware:
    """As it comes up when all is well. Azure's Ethernet card is an RDMA device, too."""
    kind: CardKind | None = {"efa": "efa", "infiniband": "infiniband"}.get(machine.fabric)  # type: ignore[assignment]
    cards = [RdmaDevice(name=f"card{n}", kind=kind, active=True) for n in range(machine.fabric_cards)] if kind else []
    if machine.provider == "azure":
        cards.append(RdmaDevice(name="mlx5_an0", kind="roce", active=True))
    return NetworkHardware(
        provider=machine.provider,
        type=machine.name,
        fabric=machine.fabric,
        address="10.0.0.4",
        interfaces=INTERFACES,
        gateways=GATEWAYS,
        cards=tuple(cards),
        files=frozenset([*OFI_PLUGINS, CUDART, *TOPOLOGIES.values()]),
        library_path="/usr/local/cuda/lib64",
    )


def _env(machine: NetworkHardware) -> dict[str, str]:
    return {variable.name: variable.value for variable in fabric_env(machine)}


@pytest.mark.parametrize("machine", _ALL, ids=lambda machine: machine.name)
def test_every_type_of_the_catalog_gets_what_its_fabric_needs_and_nothing_else(machine: MachineType) -> None:
    env = _env(_as_sold(machine))
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("ens32", "=ens32")
    match machine.provider, machine.fabric:
        case "aws", "efa":
            assert env.keys() == _SOCKETS | _EFA
            assert env["FI_PROVIDER"] == "efa"
        case "azure", "infiniband":
            assert env.keys() == _SOCKETS | {"NCCL_IB_HCA", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_TOPO_FILE"}
            cards = 1 if machine.name == "Standard_ND40rs_v2" else 8
            assert env["NCCL_IB_HCA"] == "=" + ",".join(f"card{number}" for number in range(cards))
        case "azure", _:
            assert env.keys() == _SOCKETS | {"NCCL_IB_DISABLE"}
        case _:
            assert env.keys() == _SOCKETS


def test_the_catalog_has_types_of_every_kind_that_is_told_apart_above() -> None:
    kinds = {(machine.provider, machine.fabric) for machine in _ALL}
    assert kinds == {
        ("aws", "efa"),
        ("aws", ""),
        ("gcp", "gvnic"),
        ("gcp", ""),
        ("azure", "infiniband"),
        ("azure", ""),
    }
    assert {machine.family for machine in _ALL if machine.fabric == "efa"} >= {"g5", "p3dn", "p4d", "p5", "p6-b200"}


def test_without_its_cards_a_machine_gets_no_variable_that_names_them() -> None:
    bare = NetworkHardware(provider="aws", type="p4d.24xlarge", fabric="efa", address="10.0.0.4", interfaces=INTERFACES)
    assert _env(bare).keys() == _SOCKETS


def test_the_plug_in_comes_before_other_libraries_and_once() -> None:
    sold = _as_sold(catalog().type("p4d.24xlarge"))
    assert _env(sold)["LD_LIBRARY_PATH"] == f"{OFI_PLUGINS[0]}:/opt/gpuctl/lib:/usr/local/cuda/lib64"
    old = NetworkHardware(
        provider="aws",
        type="p4d.24xlarge",
        interfaces=INTERFACES,
        cards=sold.cards,
        files=frozenset([OFI_PLUGINS[2]]),
        library_path=f"{OFI_PLUGINS[2]}:/x",
    )
    assert _env(old)["LD_LIBRARY_PATH"] == f"{OFI_PLUGINS[2]}:/x"


def test_only_infiniband_that_is_up_is_used() -> None:
    cards = (
        RdmaDevice(name="mlx5_0", kind="infiniband", active=True),
        RdmaDevice(name="mlx5_1", kind="infiniband", active=False),
        RdmaDevice(name="mlx5_2", kind="roce", active=True),
    )
    lab = NetworkHardware(provider="ssh", address="10.0.0.4", interfaces=INTERFACES, cards=cards)
    assert _env(lab)["NCCL_IB_HCA"] == "=mlx5_0"
    assert "NCCL_IB_PCI_RELAXED_ORDERING" not in _env(lab)
    roce_only = NetworkHardware(provider="ssh", address="10.0.0.4", interfaces=INTERFACES, cards=cards[2:])
    assert _env(roce_only).keys() == _SOCKETS, "a lab's RoCE may well work: NCCL finds out"


@pytest.mark.parametrize(
    ("address", "gateways", "expected"),
    [
        ("10.0.1.9", GATEWAYS, "ens33"),  # the node's address goes before the default route
        ("", GATEWAYS, "ens32"),
        ("127.0.0.7", GATEWAYS, "lo"),  # a local node
        ("203.0.113.5", GATEWAYS, "ens32"),  # its public address is on no interface: the cloud translates
        ("", (Gateway(address="10.9.0.1", interface="gone"),), "ens33"),  # and no bridge
        ("not-an-address", GATEWAYS, "ens32"),
    ],
)
def test_the_interface_is_the_one_with_the_address_else_the_one_that_leads_out(
    address: str, gateways: tuple[Gateway, ...], expected: str
) -> None:
    found = traffic_interface(address, INTERFACES, gateways)
    assert found is not None and found.name == expected


def test_a_machine_without_a_network_gets_nothing() -> None:
    assert fabric_env(NetworkHardware(provider="ssh", interfaces=(_interface("eth0", up=False),))) == ()


def test_each_variable_has_its_reason_and_they_come_in_order() -> None:
    for machine in _ALL:
        found: tuple[Variable, ...] = fabric_env(_as_sold(machine))
        assert all(variable.why for variable in found)
        assert [variable.name for variable in found] == sorted(variable.name for variable in found)
