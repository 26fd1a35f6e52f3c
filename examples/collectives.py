"""What collectives send: bytes a rank, as the kernel counts them, beside the formulas of docs/concepts/collectives.md.

torchrun --nproc-per-node 4 examples/collectives.py
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gpuctl.trainers.transport.socket_bytes import SocketBytes

TENSOR_BYTES = 16_000_000


# --8<-- [start:ring]
def pass_on(leaving: torch.Tensor, arriving: torch.Tensor) -> None:
    """Send one tensor to the next rank of the ring, and receive one of the same size from the previous rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(leaving, (rank + 1) % ranks)
    dist.recv(arriving, (rank - 1) % ranks)
    assert sending is not None
    sending.wait()


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """The sum of all ranks' tensors, in place."""
    chunks = tensor.tensor_split(dist.get_world_size())  # views
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)


def ring_reduce_scatter(chunks: Sequence[torch.Tensor]) -> None:
    """Rank r ends with the sum of all ranks' chunk r + 1, after N-1 steps of one chunk each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        growing = chunks[(rank - step - 1) % ranks]
        arriving = torch.empty_like(growing)
        pass_on(chunks[(rank - step) % ranks], arriving)
        growing += arriving


def ring_all_gather(chunks: Sequence[torch.Tensor]) -> None:
    """What rank r holds in chunk r + 1 goes round, in N-1 steps of one chunk each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        pass_on(chunks[(rank + 1 - step) % ranks], chunks[(rank - step) % ranks])


# --8<-- [end:ring]


# --8<-- [start:whole]
def whole_tensor_ring(tensor: torch.Tensor) -> None:
    """The sum of all ranks' tensors, in place, which each rank adds up in another order."""
    leaving, arriving, total = tensor.clone(), torch.empty_like(tensor), tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        pass_on(leaving, arriving)
        total += arriving
        leaving, arriving = arriving, leaving
    tensor.copy_(total)


# --8<-- [end:whole]


def all_gather(tensor: torch.Tensor) -> None:
    parts = list(tensor.chunk(dist.get_world_size()))
    dist.all_gather(parts, parts[dist.get_rank()].clone())


def reduce_scatter(tensor: torch.Tensor) -> None:
    parts = list(tensor.chunk(dist.get_world_size()))
    dist.reduce_scatter(torch.empty_like(parts[0]), parts)


def broadcast(tensor: torch.Tensor) -> None:
    dist.broadcast(tensor, src=0)


def all_to_all(tensor: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(tensor), tensor)


Collective = Callable[[torch.Tensor], object]

COLLECTIVES: dict[str, Collective] = {
    "all-reduce": dist.all_reduce,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
    "all-to-all": all_to_all,
    "broadcast": broadcast,
    "ring all-reduce": ring_all_reduce,
    "its first half": lambda tensor: ring_reduce_scatter(tensor.chunk(dist.get_world_size())),
    "whole-tensor ring": whole_tensor_ring,
}

SUMS = ("all-reduce", "ring all-reduce", "whole-tensor ring")
"""Those after which all ranks should hold the same."""


def sent(collective: Collective, tensor: torch.Tensor, counter: SocketBytes) -> int:
    """Bytes that this rank sends for it. The barriers, of some bytes each, let nobody begin early or read too soon."""
    dist.barrier()
    before = counter.read()
    collective(tensor)
    dist.barrier()
    return (counter.read() - before).sent


def differing(tensor: torch.Tensor) -> float:
    """The share of elements that are not the same bits on all ranks."""
    ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, tensor)
    return float(torch.stack([other != ranks[0] for other in ranks]).any(dim=0).float().mean())


def numbers(size: int = TENSOR_BYTES) -> torch.Tensor:
    """``size`` bytes of float32, other ones on each rank, which divide evenly among the ranks."""
    torch.manual_seed(dist.get_rank())
    ranks = dist.get_world_size()
    return torch.randn(size // 4 // ranks * ranks)


def main() -> None:
    dist.init_process_group("gloo")
    counter = SocketBytes()
    print_once(f"{'MB sent by rank':20}" + "".join(f"{rank:>7}" for rank in range(dist.get_world_size())))
    for name, collective in COLLECTIVES.items():
        tensor = numbers()
        mine = torch.tensor([sent(collective, tensor, counter)])
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
        told = f"   {differing(tensor):.0%} of elements differ between ranks" if name in SUMS else ""
        print_once(f"{name:20}" + "".join(f"{int(one) / 1e6:7.1f}" for one in ranks) + told)
    dist.destroy_process_group()


def print_once(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
