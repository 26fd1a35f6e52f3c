"""What the ranks of the traffic tests run: collectives, and a count of what they send."""

from __future__ import annotations

import torch
import torch.distributed as dist
from examples.collectives import COLLECTIVES, SUMS, differing, numbers, ring_all_reduce, sent, whole_tensor_ring

from gpuctl.trainers.transport.socket_bytes import SocketBytes, Traffic


def sent_and_differing(size: int) -> dict[str, tuple[int, float]]:
    """Of each collective on ``size`` bytes: what this rank sent, and of sums the share of elements that differ."""
    counter = SocketBytes()
    found = {}
    for name, collective in COLLECTIVES.items():
        tensor = numbers(size)
        found[name] = (sent(collective, tensor, counter), differing(tensor) if name in SUMS else 0.0)
    return found


def summed(values: list[list[float]]) -> tuple[list[float], list[float]]:
    """What the ring of chunks and that of whole tensors make of ``values``, a list for each rank."""
    chunks, whole = (torch.tensor(values[dist.get_rank()]) for _ in range(2))
    ring_all_reduce(chunks)
    whole_tensor_ring(whole)
    return chunks.tolist(), whole.tolist()


def all_reduced_and_dropped() -> tuple[Traffic, int, int]:
    """Traffic of an all-reduce of 16 MB, and what the sockets had sent before and after its group was dropped."""
    counter = SocketBytes()
    group = dist.new_group()
    tensor = numbers()
    dist.barrier()
    before = counter.read()
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    after = counter.read()
    dist.barrier()  # nobody closes its connections before all have read
    dist.destroy_process_group()
    del group
    return after - before, after.sent, counter.read().sent
