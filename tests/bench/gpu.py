"""How long ``save`` holds up a training whose state is on a GPU, beside a plain copy of the same bytes to pinned memory
and beside ``torch.distributed.checkpoint.async_save``, in one process and in turns.

    python tests/bench/gpu.py [--gib 4] [--runs 5] [--steps 200] [--device cuda]

``--device cpu`` only shows that this program works. Checkpoints go to a temporary folder (``TMPDIR``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402

from gpuctl import Checkpointer  # noqa: E402

_TENSOR_BYTES = 64 << 20
_SAVE_EVERY = 40

Begin = Callable[[int], Callable[[], object]]
"""Begins the save of a step, and returns what waits for its end."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        measure(device, int(options.gib * 2**30), options.runs, options.steps, Path(folder))
    dist.destroy_process_group()


def measure(device: torch.device, size: int, runs: int, steps: int, folder: Path) -> None:
    count = max(1, size // _TENSOR_BYTES)
    weights = {f"w{i}": torch.randn(_TENSOR_BYTES // 4, device=device) for i in range(count)}
    ways: dict[str, Begin] = {
        "gpuctl": ours(weights, folder / "ours"),
        "copy to pinned memory": copy(weights, device),
        "dcp.async_save": theirs(weights, folder / "dcp"),
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {count * _TENSOR_BYTES / 2**30:g} GiB in {count} tensors")
    numbers = iter(range(1, 1 << 30))
    blocked: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(runs + 1):
        for way, begin in ways.items():
            change(weights, device)
            began = time.perf_counter()
            wait = begin(next(numbers))
            took_s = time.perf_counter() - began
            wait()
            if run:  # the first of each makes its buffers
                blocked[way].append(took_s)
    for way, times in blocked.items():
        print(f"held up by {way}: {told(times)}")
    print(f"a step alone: {percentiles(list(step_times(device, weights, steps, None, numbers)))}")
    for way in ("gpuctl", "dcp.async_save"):
        print(f"a step with {way}: {percentiles(list(step_times(device, weights, steps, ways[way], numbers)))}")


def ours(weights: dict[str, Tensor], folder: Path) -> Begin:
    checkpointer, state = Checkpointer(str(folder), keep=1), {"weights": weights}
    checkpointer.restore(state)

    def begin(number: int) -> Callable[[], object]:
        checkpointer.save(number, state)
        return checkpointer.wait

    return begin


def copy(weights: dict[str, Tensor], device: torch.device) -> Begin:
    """Into memory that is there already: the least that any save must do."""
    on_gpu = device.type == "cuda"
    buffers = {name: torch.zeros(w.shape, pin_memory=on_gpu) for name, w in weights.items()}

    def begin(_: int) -> Callable[[], object]:
        for name, tensor in weights.items():
            buffers[name].copy_(tensor, non_blocking=True)
        finish(device)
        return lambda: None

    return begin


def theirs(weights: dict[str, Tensor], folder: Path) -> Begin:
    def begin(number: int) -> Callable[[], object]:
        saved: Any = dcp.async_save({"weights": weights}, checkpoint_id=folder / str(number % 2))
        wait: Callable[[], object] = saved.result
        return wait

    return begin


def step_times(
    device: torch.device, weights: dict[str, Tensor], steps: int, begin: Begin | None, numbers: Iterator[int]
) -> Iterator[float]:
    """Seconds of each step but those that a save holds up: what a save costs the steps beside it."""
    matrix = torch.randn(2048 if device.type == "cuda" else 256, 2048 if device.type == "cuda" else 256, device=device)
    waits: list[Callable[[], object]] = []
    for step in range(steps):
        if begin is not None and step % _SAVE_EVERY == 0:
            for wait in waits:
                wait()
            change(weights, device)
            waits = [begin(next(numbers))]
        began = time.perf_counter()
        for _ in range(20):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        finish(device)
        yield time.perf_counter() - began
    for wait in waits:
        wait()


def change(weights: dict[str, Tensor], device: torch.device) -> None:
    """All of it, as an optimizer's step does, or less would be written."""
    for tensor in weights.values():
        tensor.add_(1)
    finish(device)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def told(times: list[float]) -> str:
    return f"median {statistics.median(times):.3f} s, from {min(times):.3f} to {max(times):.3f}"


def percentiles(times: list[float]) -> str:
    ordered = sorted(times)
    return f"median {1e3 * statistics.median(ordered):.2f} ms, p99 {1e3 * ordered[int(0.99 * len(ordered))]:.2f} ms"


if __name__ == "__main__":
    main()
