"""The job behind ``gpuctl verify``: what each worker of it does.

Ports first: who cannot connect is named, where the first collective would only hang. Then each device alone, then pairs
of nodes with all their workers, then all nodes. What the workers tell each other goes through the job's store as JSON;
rank 0 writes what was found into the bucket and ends with code 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import torch
import torch.distributed as dist

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.network import tcp_probe
from gpuctl.cluster.network.addresses import family_of
from gpuctl.cluster.network.devices import found_cards, gpus_with_driver
from gpuctl.cluster.network.records import BlockedPort
from gpuctl.cluster.network.verification import AllReduceResult, DeviceCheck, NodeFabric, Verification, judged
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.trainers.diagnostics.bandwidth import measure, schedule
from gpuctl.trainers.diagnostics.burn_in import burn_in
from gpuctl.trainers.diagnostics.nccl_log import transport
from gpuctl.trainers.world import job_store

T = TypeVar("T")

_MIB = 1024 * 1024
_PAIR_BYTES = {"nccl": 256 * _MIB, "gloo": 4 * _MIB}
_SIZES = {"nccl": (_MIB, 32 * _MIB, 512 * _MIB), "gloo": (_MIB // 4, _MIB, 16 * _MIB)}
_ALONE = 8
"""Up to so many nodes, pairs are measured one after the other; beyond, that takes too long."""
_PATIENCE = timedelta(seconds=180)
"""For one step of the slowest worker."""
_CPU_S = 1.0


class Exchange:
    """Exchanges small values between workers by name; each name is used once."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def tell(self, name: str, value: Any) -> None:
        self._store.set(f"{name}/{self._rank}", msgspec.json.encode(value).decode())

    def all(self, name: str, kind: type[T]) -> list[T]:
        """What every rank has told by this name, in their order. Waits for the last one."""
        return [self.of(name, rank, kind) for rank in range(self._size)]

    def of(self, name: str, rank: int, kind: type[T]) -> T:
        return msgspec.json.decode(self._store.get(f"{name}/{rank}"), type=kind)

    def meet(self, name: str) -> None:
        """Go on when all ranks are here."""
        if self._store.add(f"{name}/here", 1) == self._size:
            self._store.set(f"{name}/all", "1")
        self._store.wait([f"{name}/all"])


class WorkerLocation(msgspec.Struct, frozen=True):
    """The node and device of one worker."""

    node: str
    local_rank: int
    local_size: int
    address: str = ""
    port: int = 0
    """Of a door that others can knock at; only local rank 0 has one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends the process with code 1 if something is wrong, on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--burn-in", type=float, default=10.0)
    options = parser.parse_args(arguments)
    context = WorkerContext.from_env()
    if context is None:
        raise BadInput("this module is the workers' part of verify", "run gpuctl verify")
    found = _Worker(context).verify(options.burn_in)
    if found is None:
        return
    store = open_bucket(context.bucket)
    found = msgspec.structs.replace(found, findings=judged(found, queue.cluster_spec(store).promised), at=time.time())
    store.put(layout.verification(context.job, context.round), encode(found))
    failures = [one.what for one in found.findings if one.severity == "fail"]
    if failures:
        print(f"verify: {failures[0]}", file=sys.stderr)
        sys.exit(1)


class _Worker:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local_rank, self._local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        on_gpu = torch.cuda.is_available()
        self._backend = "nccl" if on_gpu else "gloo"
        self._device = torch.device("cuda", self._local_rank) if on_gpu else torch.device("cpu")
        self._exchange = Exchange(job_store("verify", _PATIENCE), self._rank, self._size)
        self._places: list[WorkerLocation] = []
        self._nodes: tuple[str, ...] = ()

    def verify(self, burn_in_s: float) -> Verification | None:
        """Run all checks; returns the results on rank 0, ``None`` elsewhere."""
        blocked = self._probe_ports()
        found = Verification(
            job=self._context.job,
            round=self._context.round,
            backend=self._backend,
            nodes=self._nodes,
            workers=self._local_size,
            blocked=blocked,
        )
        nodes, workers = len(self._nodes), self._size
        counted = f"{nodes} node{'s' if nodes > 1 else ''}, {workers} worker{'s' if workers > 1 else ''}"
        self._say(f"{counted}, {self._backend}")
        self._exchange.tell("device", self._tried(burn_in_s))
        devices = tuple(self._exchange.all("device", DeviceCheck))
        found = msgspec.structs.replace(found, devices=devices)
        self._say("devices tried")
        # One device that is lost and all wait for it; and it is the root of whatever would be found.
        if not blocked and self._size > 1 and not any(one.trouble for one in devices):
            found = self._measure(found)
        self._exchange.tell("fabric", self._fabric())
        fabrics = self._exchange.all("fabric", NodeFabric)
        self._exchange.meet("end")  # rank 0's machine serves the store
        one_each = [fabric for fabric, place in zip(fabrics, self._places, strict=True) if place.local_rank == 0]
        return msgspec.structs.replace(found, fabrics=tuple(one_each)) if self._rank == 0 else None

    def _tried(self, seconds: float) -> DeviceCheck:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # on purpose: from local nodes that are too many for them
        if gpus := 0 if hidden or self._device.type == "cuda" else gpus_with_driver():
            # Training would go on the CPU, at the price of the GPUs.
            check = DeviceCheck(node=self._context.node, rank=self._rank, device="cpu", tflops=0.0, products=0)
            return msgspec.structs.replace(check, unseen_gpus=gpus, trouble=_why_no_gpu())
        most_s = seconds if self._device.type == "cuda" else min(seconds, _CPU_S)
        return burn_in(self._context.node, self._rank, self._device, most_s)

    def _probe_ports(self) -> tuple[BlockedPort, ...]:
        """Try to reach every node from every other one on a port that the kernel chose, as collectives use them."""
        with contextlib.ExitStack() as stack:
            place = WorkerLocation(self._context.node, self._local_rank, self._local_size)
            if self._local_rank == 0:
                address = _my_address()
                server = socket.create_server((address, 0), family=family_of(address), backlog=1024)
                stack.enter_context(server)
                place = msgspec.structs.replace(place, address=address, port=server.getsockname()[1])
            self._exchange.tell("place", place)
            self._places = self._exchange.all("place", WorkerLocation)
            hosts = [one for one in self._places if one.local_rank == 0]
            self._nodes = tuple(one.node for one in hosts)
            shut: list[BlockedPort] = []
            if self._local_rank == 0:
                others = [host for host in hosts if host.node != place.node]
                made = tcp_probe.contacts(
                    tcp_probe.ProbeTarget(one.node, one.address, one.port, "worker") for one in others
                )
                shut = [
                    BlockedPort(source=place.node, target=one.node, service=one.service, port=one.port, why=one.why)
                    for one in made
                    if not one.ok
                ]
            self._exchange.tell("shut", shut)
            return tuple(one for told in self._exchange.all("shut", list[BlockedPort]) for one in told)

    def _measure(self, found: Verification) -> Verification:
        with self._world():
            turns = schedule(len(self._nodes), together=len(self._nodes) > _ALONE)
            for number, matches in enumerate(turns):
                self._turn(number, matches)
            pairs = [self._pair_of(number, match) for number, matches in enumerate(turns) for match in matches]
            self._say(f"{len(pairs)} pairs measured")
            sizes = _SIZES[self._backend] if len(self._nodes) > 2 or not pairs else _SIZES[self._backend][-1:]
            everyone = [measure(None, self._nodes, self._size, size, self._device) for size in sizes]
            self._exchange.meet("measured")
        together = any(len(matches) > 1 for matches in turns)
        return msgspec.structs.replace(found, pairs=tuple(pairs), together=together, everyone=tuple(everyone))

    def _turn(self, number: int, matches: Sequence[tuple[int, int]]) -> None:
        """One pair, or several that share no node; the other workers wait."""
        mine = next((match for match in matches if self._node_rank() in match), None)
        if mine is not None:
            ranks = self._ranks(mine)
            names = [self._nodes[mine[0]], self._nodes[mine[1]]]
            group = dist.new_group(ranks, timeout=_PATIENCE, backend=self._backend, use_local_synchronization=True)
            measured = measure(group, names, len(ranks), _PAIR_BYTES[self._backend], self._device)
            if self._rank == ranks[0]:
                self._exchange.tell(f"pair/{number}", measured)
            dist.destroy_process_group(group)
        self._exchange.meet(f"turn/{number}")

    def _pair_of(self, number: int, match: tuple[int, int]) -> AllReduceResult:
        return self._exchange.of(f"pair/{number}", self._ranks(match)[0], AllReduceResult)

    def _ranks(self, match: tuple[int, int]) -> list[int]:
        names = {self._nodes[match[0]], self._nodes[match[1]]}
        return [rank for rank, place in enumerate(self._places) if place.node in names]

    def _node_rank(self) -> int:
        return self._nodes.index(self._context.node)

    @contextlib.contextmanager
    def _world(self) -> Iterator[None]:
        """A process group of all ranks. NCCL tells this node's folder of the round what it does."""
        os.environ["NCCL_DEBUG_FILE"] = str(self._context.round_dir / f"nccl.{self._local_rank}")
        if self._backend == "nccl":
            torch.cuda.set_device(self._device)
        dist.init_process_group(self._backend, timeout=_PATIENCE)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def _fabric(self) -> NodeFabric:
        cards = [card for card in found_cards() if card.active]
        return NodeFabric(
            node=self._context.node,
            efa=sum(card.kind == "efa" for card in cards),
            infiniband=sum(card.kind == "infiniband" for card in cards),
            interface=_traffic_interface() or "",
            transport=transport(_nccl_said(self._context.round_dir), os.environ),
        )

    def _say(self, line: str) -> None:
        if self._rank == 0:
            print(line, flush=True)


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
        return str(error).splitlines()[0][:300]
    return "it sees no device"


def _nccl_said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))


def _traffic_interface() -> str | None:
    """What this node's variables choose (see ``bootstrap.network.nccl_env``)."""
    name = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    name = name.partition(",")[0].lstrip("=")
    return name if name in psutil.net_if_addrs() else None


def _my_address() -> str:
    """This worker's address on the interface that training uses; where none is chosen, on the way to the master."""
    if name := _traffic_interface():
        for one in psutil.net_if_addrs()[name]:
            if one.family == socket.AF_INET:
                return one.address
    master = os.environ["MASTER_ADDR"]
    with socket.socket(family_of(master), socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
