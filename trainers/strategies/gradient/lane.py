"""``lane_of``: where the buckets of a model are worked on, one after the other, while the backward pass goes on.

On CPU by a thread of its own with a process group of its own, on a GPU in a stream of its own. Their order is that of
the buckets, which is the same on all ranks. So what is done with a bucket may make any number of collectives.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Run = Callable[[Callable[[], None], Tensor], Future[Tensor]]
"""Has a function called after those before. The future has the tensor then, or raises what the function has raised."""


def lane_of(model: DistributedDataParallel) -> tuple[dist.ProcessGroup, Run]:
    """A lane, and the group that is used in it."""
    of_ddp = model.process_group
    if model.device.type == "cuda":
        # NCCL's order is that of the calls, and here they are made by the same thread.
        stream = torch.cuda.Stream(model.device)
        return of_ddp, lambda work, buffer: _in_stream(stream, work, buffer)
    # In a thread, two collectives of one group could meet another rank's in the other order (a broadcast of buffers).
    group = dist.new_group(
        dist.get_process_group_ranks(of_ddp),
        timeout=of_ddp._get_backend(model.device).options._timeout,  # else torch's default, which is half an hour
        backend="gloo",
        use_local_synchronization=True,
    )
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    threads = torch.get_num_threads()

    def work_off() -> None:
        torch.set_num_threads(threads)  # else as many as there are cores, in this thread
        while True:
            waiting.get()()

    threading.Thread(target=work_off, name="gradient exchange", daemon=True).start()

    def run(work: Callable[[], None], buffer: Tensor) -> Future[Tensor]:
        work_on, future = _promised(work, buffer, Future())
        waiting.put(work_on)
        return future

    return group, run


def _in_stream(stream: torch.cuda.Stream, work: Callable[[], None], buffer: Tensor) -> Future[Tensor]:
    work_on, future = _promised(work, buffer, Future(devices=[buffer.device]))
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    buffer.record_stream(stream)
    with torch.cuda.stream(stream):
        work_on()
    return future


def _promised(
    work: Callable[[], None], buffer: Tensor, done: Future[Tensor]
) -> tuple[Callable[[], None], Future[Tensor]]:
    """What to call, and the future that it fulfils."""
    errors: list[Exception] = []

    def work_on() -> None:
        try:
            with torch.no_grad():
                work()
        except Exception as error:  # noqa: BLE001 - raised by backward, in the script
            errors.append(error)
        done.set_result(buffer)

    def result(_: Future[Tensor]) -> Tensor:
        # An exception that a future was set to DDP takes for its value; one that a callback raises is raised by
        # backward, as a RuntimeError that has its type, text and place.
        if errors:
            raise errors[0]
        return buffer

    return work_on, done.then(result)
