"""Means over four real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpuctl import Cast, Int8, TopK
from gpuctl.trainers.compression.codec import Codec, decode
from gpuctl.trainers.compression.reducers import two_hop_bytes
from tests.trainers import ranks
from tests.trainers.rank_scripts import exchanging

LENGTHS = [5000, 1, 777]


def _reduced(how: str, codec: Codec | Cast | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The mean that all ranks got, and that of the vectors; all of them end to end."""
    told = ranks.run(4, exchanging.reduced, how, codec, LENGTHS, dtype)
    means = [torch.cat(of_rank[:3]) for of_rank in told]
    assert all(torch.equal(mean, means[0]) for mean in means), "ranks hold other bits"
    assert [len(mean) for mean in told[0][:3]] == LENGTHS
    return means[0], torch.stack([torch.cat(of_rank[3:]) for of_rank in told]).mean(0)


def test_the_exact_mean() -> None:
    mean, expected = _reduced("exact", None)
    assert torch.allclose(mean, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("name", "bits"), [("bf16", 8), ("fp16", 11)])
def test_a_mean_in_half_the_width_is_off_by_its_rounding(name: str, bits: int) -> None:
    mean, expected = _reduced("cast", Cast(name))  # type: ignore[arg-type]
    off = (mean - expected).abs().max() / expected.abs().max()
    assert 2.0 ** -(bits + 4) < off < 2.0 ** -(bits - 2)


def test_large_values_in_fp16_stay_finite() -> None:
    told = ranks.run(4, _of_large_values)
    assert all(value == pytest.approx(40_000, rel=1e-3) for value in told)


def _of_large_values() -> float:
    import torch.distributed as dist

    from gpuctl.trainers.compression.reducers import cast_mean

    assert dist.group.WORLD is not None
    return float(cast_mean([torch.full((10,), 40_000.0)], Cast("fp16"), dist.group.WORLD)[0][3])


def test_what_is_gathered_is_the_mean_of_what_each_has_sent() -> None:
    codec = TopK(0.1, chunk=512)
    told = ranks.run(4, exchanging.reduced, "gathered", codec, LENGTHS, torch.float64)
    for index, length in enumerate(LENGTHS):
        sent = [decode(codec, codec.encode(xs[3 + index]), length, torch.float64) for xs in told]
        expected = (sent[0] + sent[1] + sent[2] + sent[3]) / 4  # in the order of ranks
        assert all(torch.equal(of_rank[index], expected) for of_rank in told)


def test_everything_gathered_is_the_mean() -> None:
    mean, expected = _reduced("gathered", TopK(1))
    assert torch.allclose(mean, expected, rtol=0, atol=1e-15)


def test_two_hops_are_within_two_roundings() -> None:
    mean, expected = _reduced("two hops", Int8(64))
    # Values of a normal distribution: the largest of 64 is some 2.5, four ranks are rounded apart, then their mean.
    assert 1e-3 < (mean - expected).abs().max() < 2 * 4 / 127


@pytest.mark.parametrize("how", ["exact", "cast", "gathered", "two hops"])
def test_what_the_sockets_send_is_what_the_codec_says(how: str) -> None:
    lengths, ranks_ = [400_000, 300_000], 4
    codec = {"cast": Cast("bf16"), "gathered": TopK(0.05), "two hops": Int8()}.get(how)
    said = {
        "exact": 2 * 3 / 4 * 4 * sum(lengths),
        "cast": 2 * 3 / 4 * Cast("bf16").wire_bytes(sum(lengths)),
        "gathered": 3 * sum(map(TopK(0.05).wire_bytes, lengths)),
        "two hops": two_hop_bytes(sum(lengths), Int8(), ranks_),
    }[how]
    for bytes_ in ranks.run(ranks_, exchanging.sent, how, codec, lengths, 5):
        assert bytes_ == pytest.approx(said, rel=0.02)


def test_two_hops_take_a_quarter_of_the_bytes_and_a_scale() -> None:
    dense = 2 * 3 / 4 * 4_000_000 * 4
    assert two_hop_bytes(4_000_000, Int8(256), 4) / dense == pytest.approx(1 / 4 * (1 + 4 / 256), rel=1e-3)
