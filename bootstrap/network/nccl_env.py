"""Which variables make NCCL, gloo and libfabric use a node's fastest network, and nothing else.

A pure function of what the node is and has, so that every type of every cloud is a row of a table in its tests. Where
the rules come from:

- NCCL's variables: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. ``=`` before a name means that very
  name; without it a name is a prefix, and ``eth1`` would take ``eth10`` too.
- EFA: the EFA cheatsheet of aws-samples/awsome-distributed-training (1.architectures/efa-cheatsheet.md). libfabric >=
  1.18 with aws-ofi-nccl >= 1.7 needs almost nothing, and older ones suffer no harm from what stands here. Not
  ``FI_EFA_USE_DEVICE_RDMA``: libfabric >= 1.18 knows by itself, and aborts where the card cannot (its PR 8661).
- Azure: what the vendor's HPC images write into ``/etc/nccl.conf``, and its examples for ND machines.
- Google: NCCL knows gVNIC and sets its threads and sockets by itself (``Using 4 threads and 1 sockets per thread``).

``NCCL_NET`` is left alone although it would turn a silent fall-back into an error: newer plug-ins changed the name it
would have to hold, and a node alone trains well without. ``net_plugin`` and ``gpuctl verify`` look instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuctl.cluster.network.records import Gateway, Interface, RdmaDevice, carrier

OFI_PLUGINS = ("/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "/opt/amazon/ofi-nccl/lib", "/opt/aws-ofi-nccl/install/lib")
"""Where EFA's installer has put NCCL's plug-in, the newest place first."""
LIBFABRIC = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib")
"""Where EFA's installer has put what the plug-in is linked to. The system's loader knows that by itself."""
INSTALLED = ("/opt/amazon/ofi-nccl", "/opt/amazon/efa", "/opt/aws-ofi-nccl")
"""The folders with all of that: the plug-in also reads maps of machines which lie beside it."""
TOPOLOGIES = {
    "ND40rs_v2": "/opt/microsoft/ndv2-topo.xml",
    "ND96asr_v4": "/opt/microsoft/ndv4-topo.xml",
    "ND96amsr_A100_v4": "/opt/microsoft/ndv4-topo.xml",
    "ND96isr_H100_v5": "/opt/microsoft/ndv5-topo.xml",
    "ND96isr_H200_v5": "/opt/microsoft/ndv5-topo.xml",
}
"""By Azure's size: where its HPC image has the map of GPUs and cards that the hypervisor hides."""
CUDART = "/opt/gpuctl/lib/libcudart.so"
"""Link to torch's own CUDA runtime (see ``boot.install``): EFA's plug-in opens it by this name, without a version."""


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class NetworkHardware:
    """The facts of a machine that the choice of variables depends on."""

    provider: str
    """``aws``, ``gcp``, ``azure``, ``ssh`` or ``local``."""
    type: str = ""
    """The cloud's own name of the instance type."""
    fabric: str = ""
    """What that type has: ``efa``, ``infiniband``, ``gvnic`` or nothing (see ``node_spec.Promise``)."""
    address: str = ""
    """What the others know the node by; empty: that of the interface which leads out."""
    interfaces: tuple[Interface, ...] = ()
    gateways: tuple[Gateway, ...] = ()
    cards: tuple[RdmaDevice, ...] = ()
    files: frozenset[str] = frozenset()
    """Those of ``OFI_PLUGINS``, ``CUDART`` and ``TOPOLOGIES`` that are there."""
    library_path: str = ""
    """``LD_LIBRARY_PATH`` as it is."""


def traffic_interface(address: str, interfaces: Sequence[Interface], gateways: Sequence[Gateway]) -> Interface | None:
    """The one that carries training traffic: it has the node's address; failing that it leads out; failing that it is
    up, and rather a card than not. A machine's other cards, and bridges for containers, lead to nobody."""
    if address and (found := carrier(address, interfaces)):
        return found
    by_name = {interface.name: interface for interface in interfaces}
    for gateway in gateways:
        if gateway.interface in by_name:
            return by_name[gateway.interface]
    usable = [i for i in interfaces if i.up and any(a.scope in ("private", "public") for a in i.addresses)]
    return min(usable, key=lambda interface: interface.virtual, default=None)


def fabric_env(machine: NetworkHardware) -> tuple[Variable, ...]:
    """NCCL's variables for this hardware, sorted by name, each with its reason. Empty only without a network."""
    found = [*_sockets(machine)]
    if machine.provider == "aws":
        found += _efa(machine)
    else:
        found += _infiniband(machine)
    return tuple(sorted(found, key=lambda variable: variable.name))


def _sockets(machine: NetworkHardware) -> list[Variable]:
    interface = traffic_interface(machine.address, machine.interfaces, machine.gateways)
    if interface is None:
        return []
    has = machine.address or "the default route"
    found = [
        Variable("GLOO_SOCKET_IFNAME", interface.name, f"{interface.name} has {has}"),
        Variable("NCCL_SOCKET_IFNAME", f"={interface.name}", f"{interface.name} has {has}; bridges and tunnels do not"),
    ]
    if ":" in machine.address:
        found.append(Variable("NCCL_SOCKET_FAMILY", "AF_INET6", "the node's address is IPv6"))
    return found


def _efa(machine: NetworkHardware) -> list[Variable]:
    if not any(card.kind == "efa" for card in machine.cards):
        return []
    found = [
        Variable("FI_PROVIDER", "efa", "libfabric must not silently choose TCP"),
        Variable("FI_EFA_FORK_SAFE", "1", "workers fork: data loaders do"),
        Variable("FI_EFA_USE_HUGE_PAGE", "0", "a fork with huge pages can fail for want of memory"),
    ]
    if plugin := next((folder for folder in OFI_PLUGINS if folder in machine.files), None):
        ours = [plugin, *([CUDART.rpartition("/")[0]] if CUDART in machine.files else [])]
        others = [one for one in machine.library_path.split(":") if one and one not in ours]
        why = "where NCCL finds its EFA plug-in, and that the CUDA runtime; without either it silently uses TCP"
        found.append(Variable("LD_LIBRARY_PATH", ":".join([*ours, *others]), why))
    return found


def _infiniband(machine: NetworkHardware) -> list[Variable]:
    """Azure's machines with accelerated networking have Ethernet cards of the same driver, which NCCL would try."""
    fast = [card.name for card in machine.cards if card.kind == "infiniband" and card.active]
    if not fast:
        ethernet = machine.provider == "azure" and any(card.kind == "roce" for card in machine.cards)
        why = "the only RDMA devices are Azure's Ethernet cards, which carry no RoCE"
        return [Variable("NCCL_IB_DISABLE", "1", why)] if ethernet else []
    found = [Variable("NCCL_IB_HCA", f"={','.join(fast)}", "these are InfiniBand and active; other cards are Ethernet")]
    if machine.provider == "azure":
        found.append(Variable("NCCL_IB_PCI_RELAXED_ORDERING", "1", "the virtual PCI bus is slow in strict order"))
        topology = TOPOLOGIES.get(machine.type.removeprefix("Standard_"), "")
        if topology in machine.files:
            why = "the hypervisor hides which GPU is near which card"
            found.append(Variable("NCCL_TOPO_FILE", topology, why))
    return found
