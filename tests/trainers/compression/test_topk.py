from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuctl import TopK
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.compression.codec import ALIGN, decode


def _drawn(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


@given(
    n=st.integers(1, 700),
    chunk=st.integers(2, 300),
    ratio=st.floats(0.001, 1.0),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_what_arrives_are_values_as_they_were_and_zeros(n: int, chunk: int, ratio: float, dtype: torch.dtype) -> None:
    codec, x = TopK(ratio, chunk), _drawn(n, dtype)
    wire = codec.encode(x)
    assert wire.numel() == codec.wire_bytes(n, dtype) and wire.numel() % ALIGN == 0
    there = decode(codec, wire, n, dtype)
    sent = there != 0
    assert torch.equal(there[sent], x[sent])
    for begin in range(0, n, chunk):
        part, part_sent = x[begin : begin + chunk].abs(), sent[begin : begin + chunk]
        assert int(part_sent.sum()) == max(1, round(ratio * len(part)))
        if not part_sent.all():
            assert part[part_sent].min() >= part[~part_sent].max(), "another one is larger"


@pytest.mark.parametrize("chunk", [4096, 65536])
def test_the_last_place_of_a_chunk_comes_back(chunk: int) -> None:
    x = torch.zeros(3 * chunk + 5)
    places = [0, chunk - 1, 2 * chunk - 1, 3 * chunk, 3 * chunk + 4]
    x[places] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    codec = TopK(2 / chunk, chunk)
    assert decode(codec, codec.encode(x), len(x))[places].tolist() == [1.0, -2.0, 3.0, 0.0, 5.0]


def test_one_in_a_hundred_is_a_seventieth_of_the_bytes() -> None:
    """32 bits of value and 12 of place, for 41 of 4096."""
    n = 4096 * 1000
    assert TopK(0.01).wire_bytes(n) == pytest.approx(n * 4 * (41 / 4096) * (44 / 32), rel=1e-4)


def test_ratio_one_is_exact() -> None:
    x = _drawn(10_000, torch.float64)
    assert torch.equal(decode(TopK(1), TopK(1).encode(x), 10_000, torch.float64), x)


def test_a_nan_is_sent_so_that_the_loss_shows_it() -> None:
    x = _drawn(100)
    x[7] = torch.nan
    assert decode(TopK(0.01), TopK(0.01).encode(x), 100)[7].isnan()


@pytest.mark.parametrize("ratio", [0, 1.5, -0.1, float("nan"), "a lot", True, None])
def test_a_ratio_out_of_its_bounds_is_refused(ratio: object) -> None:
    with pytest.raises(BadInput, match="ratio must be a number above 0 and at most 1, not"):
        TopK(ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 65537, 0.5])
def test_a_chunk_out_of_its_bounds_is_refused(chunk: object) -> None:
    with pytest.raises(BadInput, match="chunk must be a whole number from 2 to 65536"):
        TopK(0.01, chunk)  # type: ignore[arg-type]
