"""What all methods share: buckets travel while the backward pass goes on."""

from __future__ import annotations

from typing import Any

import pytest

from gpuctl import DGC, Cast, Compressed, Int8, PowerSGD, TopK
from tests.trainers import ranks
from tests.trainers.rank_scripts import exchanging


@pytest.mark.parametrize(
    "exchange", [Compressed(TopK(0.1)), Compressed(Int8()), Compressed(Cast("bf16")), PowerSGD(2), DGC(0.1)], ids=repr
)
def test_a_bucket_travels_while_backward_goes_on(exchange: Any) -> None:
    for happened in ranks.run(2, exchanging.overlapping, exchange):
        assert happened == ["the last layer is exchanged", "in time"]
