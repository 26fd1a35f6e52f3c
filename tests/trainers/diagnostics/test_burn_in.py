"""The burn-in on a CPU: sound, and with a device that errs. On a GPU it never ran here."""

from __future__ import annotations

import torch
from torch import Tensor

from gpuctl.trainers.diagnostics.burn_in import burn_in

CPU = torch.device("cpu")


def test_a_sound_device_makes_no_mistake() -> None:
    check = burn_in("a", 3, CPU, 0.1)
    assert (check.node, check.rank, check.device) == ("a", 3, "cpu")
    assert check.products > 1 and check.tflops > 0 and check.memory_bytes == 64 * 1024 * 1024
    assert (check.wrong_products, check.wrong_words, check.trouble) == (0, 0, "")


def test_a_product_that_differs_in_one_bit_is_counted() -> None:
    calls = 0

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        torch.mm(left, right, out=out)
        if calls == 3:
            out.view(torch.int32)[100, 100] ^= 1

    check = burn_in("a", 0, CPU, 0.2, multiply=multiply)
    assert check.products >= 3 and check.wrong_products == 1


def test_a_product_that_is_wrong_each_time_is_no_product() -> None:
    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.mm(left, right, out=out)
        out[7] *= 1.5

    assert burn_in("a", 0, CPU, 0.0, multiply=multiply).wrong_products == 1


def test_a_bit_that_does_not_hold_is_found_in_every_pattern_that_needs_it() -> None:
    def stuck_at_zero(blocks: list[Tensor]) -> None:
        blocks[0][12345] &= ~1

    def stuck_at_one(blocks: list[Tensor]) -> None:
        blocks[0][12345] |= 1 << 40

    for fault, wrong in ((stuck_at_zero, 2), (stuck_at_one, 2)):
        # 0x55… has bit 0, 0xaa… has not; 12345 has it; bit 40 the other way round, and 12345 lacks it
        assert burn_in("a", 0, CPU, 0.0, between=fault).wrong_words == wrong


def test_two_addresses_that_are_one_are_found() -> None:
    def aliased(blocks: list[Tensor]) -> None:
        blocks[0][4096] = blocks[0][0]

    assert burn_in("a", 0, CPU, 0.0, between=aliased).wrong_words == 1


def test_a_device_that_is_lost_is_told_in_one_line() -> None:
    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        del left, right, out
        raise RuntimeError("CUDA error: the launch timed out\nCompile with TORCH_USE_CUDA_DSA")

    assert burn_in("a", 0, CPU, 0.0, multiply=multiply).trouble == "CUDA error: the launch timed out"
