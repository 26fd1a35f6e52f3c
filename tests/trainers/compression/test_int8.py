from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuctl import Int8
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.compression.codec import decode


def _drawn(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


def _draws(codec: Int8, x: torch.Tensor, count: int) -> torch.Tensor:
    """``x`` as it arrives that often, in rows, each a whole number of chunks."""
    many = x.repeat(count)
    return decode(codec, codec.encode(many, 0), many.numel(), torch.float64).view(count, -1)


@given(n=st.integers(1, 600), chunk=st.integers(1, 300), seed=st.integers(0, 2**63 - 1))
def test_each_value_arrives_within_a_step(n: int, chunk: int, seed: int) -> None:
    codec, x = Int8(chunk), _drawn(n, torch.float64)
    wire = codec.encode(x, seed)
    assert wire.numel() == codec.wire_bytes(n)
    there = decode(codec, wire, n, torch.float64)
    for begin in range(0, n, chunk):
        part = x[begin : begin + chunk]
        step = part.abs().max() / 127
        assert ((there[begin : begin + chunk] - part).abs() <= step * (1 + 1e-5)).all()


def test_the_mean_of_many_draws_is_the_value() -> None:
    """10⁴ draws: each value's mean lies within four standard deviations (one in 16,000 would not, of 300)."""
    draws, x = 10_000, _drawn(300, torch.float64)
    there = _draws(Int8(100), x, draws)
    sigma = ((there - x) ** 2).mean(0).sqrt() / draws**0.5
    # Where a value is a whole number of steps there is no spread, but 32 bits of scale.
    assert ((there.mean(0) - x).abs() <= 4 * sigma + 1e-6).all()
    assert (sigma > 0).float().mean() > 0.9, "nothing was rounded at random"


def test_the_same_seed_is_the_same_bytes_and_another_one_is_not() -> None:
    x = _drawn(1000)
    one, again, other = (Int8().encode(x, seed) for seed in (5, 5, 6))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_with_room(dtype: torch.dtype) -> None:
    """In 8 bits of precision, 88.9 steps would be 89, and a random number less than one would be one."""
    x = torch.tensor([1.0, 0.7], dtype=dtype)
    assert _draws(Int8(2), x, 10_000).mean(0)[1] == pytest.approx(float(x[1]), abs=0.0002)  # a step is 0.008


def test_zeros_stay_zeros_and_a_nan_spoils_its_chunk_alone() -> None:
    x = torch.zeros(6)
    x[4] = torch.nan
    there = decode(Int8(2), Int8(2).encode(x, 0), 6)
    assert there[:4].tolist() == [0, 0, 0, 0] and there[4:].isnan().all()


def test_a_chunk_longer_than_the_vector_is_the_vector() -> None:
    x = _drawn(1000)
    assert torch.equal(Int8(10**12).encode(x, 1), Int8(1000).encode(x, 1))


def test_a_chunk_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="chunk must be a whole number of at least 1, not 0"):
        Int8(0)
