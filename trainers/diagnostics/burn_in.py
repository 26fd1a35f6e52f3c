"""A short burn-in of one device: does it compute the same each time, and does its memory give back what was written."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import Tensor

from gpuctl.cluster.network.verification import DeviceCheck

_SIZE = {"cuda": 8192, "cpu": 512}
"""Rows of the matrices: large enough to keep a GPU's units busy."""
_BLOCK_BYTES = 256 * 1024 * 1024
_CPU_BYTES = 64 * 1024 * 1024
_PATTERNS = (0x5555_5555_5555_5555, -0x5555_5555_5555_5556)
"""Each bit is once 0 and once 1, and so are its neighbours the other way round."""

Multiply = Callable[[Tensor, Tensor, Tensor], object]
"""Puts the product of the first two into the third."""


def burn_in(
    node: str,
    rank: int,
    device: torch.device,
    seconds: float,
    multiply: Multiply | None = None,
    between: Callable[[list[Tensor]], None] = lambda _: None,
) -> DeviceCheck:
    """Products for ``seconds``, then all memory but a tenth of what is free (on a CPU, 64 MiB). ``between`` is called
    after each writing of the memory, before it is read."""
    check = DeviceCheck(node=node, rank=rank, device=device.type, tflops=0.0, products=0)
    try:
        if device.type == "cuda":
            check = replace(check, device=torch.cuda.get_device_name(device))
        tflops, products, wrong = _multiply(device, seconds, multiply or _into)
        check = replace(check, tflops=tflops, products=products, wrong_products=wrong)
        size, wrong_words = _memory(device, between)
        check = replace(check, memory_bytes=size, wrong_words=wrong_words)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # NCCL takes its memory past torch
    except (RuntimeError, AssertionError) as error:  # a device that is lost says so, in many words
        return replace(check, trouble=str(error).splitlines()[0][:300])
    return check


def _into(left: Tensor, right: Tensor, out: Tensor) -> None:
    torch.mm(left, right, out=out)


def _multiply(device: torch.device, seconds: float, multiply: Multiply) -> tuple[float, int, int]:
    """TFLOP/s, how many products, how many of them other than the first. The first is checked by Freivalds' rule: A(Bx)
    and (AB)x agree for a random x. The same product in the same memory is the same to the last bit."""
    size = _SIZE[device.type]
    generator = torch.Generator().manual_seed(0)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, generator=generator).to(device, kind) for _ in range(2))
    out, first = torch.empty_like(left), torch.empty_like(left)
    multiply(left, right, first)
    count = 1
    wrong = torch.tensor(int(not _is_product(left, right, first)), device=device)
    wait(device)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        multiply(left, right, out)
        wrong += (out != first).any()
        count += 1
        if count % 16 == 0:
            wait(device)  # or the host would run far ahead of the clock
    wait(device)
    took_s = time.monotonic() - began
    return 2 * size**3 * (count - 1) / took_s / 1e12 if count > 1 else 0.0, count, int(wrong)


def _is_product(left: Tensor, right: Tensor, product: Tensor) -> bool:
    x = torch.randn(left.shape[0], 1, generator=torch.Generator().manual_seed(1)).to(left.device, torch.float64)
    ours = product.double() @ x
    exact = left.double() @ (right.double() @ x)
    tolerance = 0.02 if left.dtype == torch.bfloat16 else 1e-4
    return bool((ours - exact).norm() <= tolerance * exact.norm())


def _memory(device: torch.device, between: Callable[[list[Tensor]], None]) -> tuple[int, int]:
    """Bytes that were tried, and words that were wrong: two patterns, then each word's own number."""
    blocks = _blocks(device)
    wrong = 0
    for pattern in _PATTERNS:
        for block in blocks:
            block.fill_(pattern)
        between(blocks)
        wrong += sum(int((block != pattern).sum()) for block in blocks)
    for number, block in enumerate(blocks):
        torch.arange(number, number + block.numel(), out=block)
    between(blocks)
    wrong += sum(_strange(number, block) for number, block in enumerate(blocks))
    return sum(block.numel() * 8 for block in blocks), wrong


def _strange(number: int, block: Tensor) -> int:
    return int((torch.arange(number, number + block.numel(), device=block.device) != block).sum())


def _blocks(device: torch.device) -> list[Tensor]:
    if device.type == "cpu":
        return [torch.empty(_CPU_BYTES // 8, dtype=torch.int64)]
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # One more block's room for what a comparison needs.
    count = max(1, int(free * 0.9) // _BLOCK_BYTES - 2)
    return [torch.empty(_BLOCK_BYTES // 8, dtype=torch.int64, device=device) for _ in range(count)]


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
