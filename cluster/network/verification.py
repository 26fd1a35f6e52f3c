"""What ``gpuctl verify`` found, and what is to be said of it. The workers measure; the judgement is a pure function.

Bandwidth is counted as nccl-tests does (NVIDIA/nccl-tests, doc/PERFORMANCE.md): of an all-reduce of S bytes by n ranks
in t seconds, the *algorithm bandwidth* is S/t, and the *bus bandwidth* is that times 2(n-1)/n, which does not depend on
n and can be held against what a network is sold as.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

import msgspec

from gpuctl.cluster.network.records import BlockedPort
from gpuctl.cluster.records.clusters import Promised

RDMA_SHARE, TCP_SHARE = 0.5, 0.25
"""Of the promised bandwidth, that a pair of nodes must reach. Our own choice: far below what a sound network gives, and
far above what is left of EFA or InfiniBand when TCP takes over (2 x p4d: 4 of 77 GB/s). TCP never fills a fast card."""
SLOW_SHARE = 0.5
"""Of the usual bandwidth, below which a node or a pair is named. Pairs on one machine's cores differ by a third."""
SLOW_DEVICE_SHARE = 0.75
"""Of the usual speed of the same kind of GPU."""


class DeviceCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The burn-in of one worker's device."""

    node: str
    rank: int
    device: str
    """Such as ``NVIDIA A100-SXM4-40GB``, or ``cpu``."""
    tflops: float
    products: int
    """Matrix products, each compared with the first."""
    wrong_products: int = 0
    memory_bytes: int = 0
    """Written with patterns and read back."""
    wrong_words: int = 0
    """Of 8 bytes, that came back as something else."""
    trouble: str = ""
    """What broke it off."""
    unseen_gpus: int = 0
    """GPUs of the node that torch does not see, so that only its CPU was there to try; ``trouble`` says why."""


class AllReduceResult(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce among all workers of ``nodes``."""

    nodes: tuple[str, ...]
    ranks: int
    bytes: int
    seconds: float = 0.0
    """Of one, the best of a few series."""
    wrong: bool = False
    """The sum was not the sum."""
    trouble: str = ""

    @property
    def algorithm_gbs(self) -> float:
        """Algorithm bandwidth in GB/s, decimal."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def bus_gbs(self) -> float:
        """Bus bandwidth in GB/s, decimal."""
        return self.algorithm_gbs * 2 * (self.ranks - 1) / self.ranks


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """The transport between machines that one node's NCCL reports (see ``trainers.diagnostics.nccl_log``)."""

    network: str = ""
    """``efa``, ``infiniband``, ``roce``, ``socket``, ``libfabric/<provider>``, another plug-in's name; empty: it said
    nothing of it."""
    gdr: bool = False
    """Cards read the GPUs' memory themselves."""
    interface: str = ""
    """That it met the others over."""
    clues: tuple[str, ...] = ()
    """Why it is no faster one, the likeliest first."""


class NodeFabric(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    efa: int = 0
    infiniband: int = 0
    """Cards that are active."""
    interface: str = ""
    """That training should use, by the node's variables."""
    transport: Transport = Transport()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A result of ``verify``: ``fail`` makes ``verify`` fail, ``warn`` does not."""

    severity: Literal["fail", "warn"]
    what: str
    cause: str = ""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The results of ``verify``, ``jobs/<job>/verification/<round>.json``."""

    job: str
    round: int
    backend: str
    """``nccl`` or ``gloo``."""
    nodes: tuple[str, ...]
    """In rank order."""
    workers: int = 1
    """Of each node."""
    devices: tuple[DeviceCheck, ...] = ()
    blocked: tuple[BlockedPort, ...] = ()
    """Then nothing was measured: the first collective would hang."""
    pairs: tuple[AllReduceResult, ...] = ()
    together: bool = False
    """Pairs that share no node were measured at the same time."""
    everyone: tuple[AllReduceResult, ...] = ()
    fabrics: tuple[NodeFabric, ...] = ()
    findings: tuple[Finding, ...] = ()
    at: float = 0.0


def judged(found: Verification, promised: Promised | None) -> tuple[Finding, ...]:
    """What is wrong, the likeliest root first: a device, a port, the transport, a wrong sum, a node, a pair."""
    return (
        *_devices(found.devices),
        *_ports(found.blocked),
        *(_transports(found, promised) if promised else ()),
        *_sums([*found.pairs, *found.everyone]),
        *_slow(found.pairs),
        *(_below(found, promised) if promised else ()),
    )


def slowest(pairs: Iterable[AllReduceResult]) -> AllReduceResult | None:
    return min((pair for pair in pairs if pair.seconds), key=lambda pair: pair.bus_gbs, default=None)


_BLIND = "a torch for CPUs only, one that is too new for the driver (nvidia-smi), or a fabric manager that does not run"


def _devices(devices: Sequence[DeviceCheck]) -> Iterable[Finding]:
    blind = {one.node: f"the driver has {one.unseen_gpus}: {one.trouble}" for one in devices if one.unseen_gpus}
    for node, told in blind.items():
        yield Finding(severity="fail", what=f"{node}: torch finds no GPU, and {told}", cause=_BLIND)
    devices = [one for one in devices if one.node not in blind]
    usual: dict[str, list[float]] = {}
    for one in devices:
        usual.setdefault(one.device, []).append(one.tflops)
    for one in devices:
        name = f"{one.node}: {one.device} of rank {one.rank}"
        if one.trouble:
            yield Finding(
                severity="fail", what=f"{name} failed: {one.trouble}", cause="see the node's kernel log (Xid)"
            )
        if one.wrong_products:
            what = f"{name} computed {one.wrong_products} of {one.products} products incorrectly"
            yield Finding(severity="fail", what=what, cause="the device is faulty: replace the node")
        if one.wrong_words:
            what = f"{name} read back {one.wrong_words} wrong words from memory"
            yield Finding(severity="fail", what=what, cause="its memory is faulty: replace the node")
        if one.device != "cpu" and one.tflops < SLOW_DEVICE_SHARE * median(usual[one.device]):
            what = f"{name} is slow: {one.tflops:.3g} TFLOP/s, the others {median(usual[one.device]):.3g}"
            yield Finding(
                severity="warn",
                what=what,
                cause="overheating, power-capped or in use by another process: nvidia-smi -q",
            )


def _ports(blocked: Sequence[BlockedPort]) -> Iterable[Finding]:
    for one in blocked:
        what = f"{one.source} cannot connect to {one.target} on port {one.port}: {one.why}"
        yield Finding(severity="fail", what=what, cause="a firewall or security group; nodes need all TCP ports")


def _transports(found: Verification, promised: Promised) -> Iterable[Finding]:
    """A fall-back to TCP is silent otherwise: all goes well, at a tenth of the speed."""
    fast = promised.fabric if promised.fabric in ("efa", "infiniband") else ""
    for one in found.fabrics:
        cards = {"efa": one.efa, "infiniband": one.infiniband}.get(fast, 0)
        missing = f"it has {cards} of {promised.fabric_cards} {fast} cards" if cards < promised.fabric_cards else ""
        used = one.transport.network
        if found.backend != "nccl" or len(found.nodes) == 1:
            if fast and missing:
                yield Finding(severity="fail", what=f"{one.node}: {missing}", cause=_CARDS_LACK)
            continue
        if fast and used and used != fast:
            causes = [*([f"{missing}: {_CARDS_LACK}"] if missing else []), *one.transport.clues]
            what = f"{one.node} uses {used} between machines, not {fast}"
            yield Finding(severity="fail", what=what, cause="; ".join(causes[:2]) or "NCCL did not say why")
        elif fast and missing:
            yield Finding(severity="fail", what=f"{one.node}: {missing}", cause=_CARDS_LACK)
        if one.interface and one.transport.interface and one.transport.interface != one.interface:
            what = f"{one.node}: NCCL connects over {one.transport.interface}, not {one.interface}"
            yield Finding(severity="warn", what=what, cause="NCCL_SOCKET_IFNAME is not what gpuctl net shows")


_CARDS_LACK = "the machine came up without them, or their driver did not load (ls /sys/class/infiniband)"


def _sums(measured: Iterable[AllReduceResult]) -> Iterable[Finding]:
    for one in measured:
        among = " and ".join(one.nodes) if len(one.nodes) <= 2 else "all nodes"
        if one.trouble:
            yield Finding(severity="fail", what=f"the all-reduce among {among} failed: {one.trouble}")
        if one.wrong:
            what = f"the all-reduce among {among} gave a wrong sum"
            yield Finding(severity="fail", what=what, cause="faulty memory or network card: verify each node alone")


def _slow(pairs: Sequence[AllReduceResult]) -> Iterable[Finding]:
    """A node is judged by its best pair, since one slow node makes all pairs with it slow; the pairs by the rest."""
    measured = [pair for pair in pairs if pair.seconds]
    best: dict[str, float] = {}
    for pair in measured:
        for node in pair.nodes:
            best[node] = max(best.get(node, 0.0), pair.bus_gbs)
    if len(best) < 3:
        return
    usual = median(best.values())
    slow = sorted(node for node in best if best[node] < SLOW_SHARE * usual)
    for node in slow:
        what = f"{node} is slow with every other node: {best[node]:.3g} GB/s at best, the median is {usual:.3g}"
        yield Finding(severity="fail", what=what, cause="its network card, cable or placement; or other traffic")
    rest = [pair for pair in measured if not set(slow) & set(pair.nodes)]
    if not rest:
        return
    usual = median(pair.bus_gbs for pair in rest)
    for pair in rest:
        if pair.bus_gbs < SLOW_SHARE * usual:
            what = f"{' and '.join(pair.nodes)} are slow together: {pair.bus_gbs:.3g} GB/s, the median is {usual:.3g}"
            yield Finding(severity="fail", what=what, cause="the path between them: each is fast with other nodes")


def _below(found: Verification, promised: Promised) -> Iterable[Finding]:
    """One finding for all of them: where everything is slow, the reason is one."""
    share = RDMA_SHARE if promised.fabric in ("efa", "infiniband") else TCP_SHARE
    least_gbs = share * promised.network_gbps / 8
    low = [pair for pair in found.pairs if pair.seconds and pair.bus_gbs < least_gbs]
    if found.backend != "nccl" or not low:
        return
    worst = min(low, key=lambda pair: pair.bus_gbs)
    what = (
        f"{len(low)} of {len(found.pairs)} pairs stay below {share:.0%} of {promised.network_gbps:g} Gb/s promised; "
        f"the slowest, {' and '.join(worst.nodes)}, has {worst.bus_gbs * 8:.3g} Gb/s"
    )
    yield Finding(severity="fail", what=what, cause="see the transport above, or the nodes are in several racks")
