"""What all methods share: buckets travel while the backward pass goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpuctl import DGC, Cast, Compressed, Int8, PowerSGD, TopK
from tests.trainers import ranks
from tests.trainers.rank_scripts import exchanging


@pytest.mark.parametrize(
    "exchange", [Compressed(TopK(0.1)), Compressed(Int8()), Compressed(Cast("bf16")), PowerSGD(2), DGC(0.1)], ids=repr
)
def test_a_bucket_travels_while_backward_goes_on(exchange: Any) -> None:
    for happened in ranks.run(2, exchanging.overlapping, exchange):
        assert happened == ["the last layer is exchanged", "in time"]


KEEPING = [Compressed(TopK(0.1)), PowerSGD(2), DGC(0.1)]


@pytest.mark.parametrize("exchange", KEEPING, ids=repr)
def test_an_inf_of_one_batch_is_seen_by_all_and_kept_by_nobody(exchange: Any) -> None:
    for shown, finite_again, before, after in ranks.run(2, exchanging.after_an_inf, exchange):
        assert shown and finite_again == [True, True]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["channels last", "transposed"])
@pytest.mark.parametrize("exchange", KEEPING[:2], ids=repr)
def test_a_parameter_is_taken_by_its_shape_however_its_memory_lies(exchange: Any, kind: str) -> None:
    out, mean, left = ranks.run(2, exchanging.laid_out, exchange, kind)[0]
    torch.testing.assert_close(out + left, mean, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["compiled", "checkpointed"])
def test_names_are_those_of_the_model_without_wrappers(kind: str) -> None:
    assert ranks.run(2, exchanging.names_kept, Compressed(TopK(0.1)), kind)[0] == ["0.weight", "2.weight"]
