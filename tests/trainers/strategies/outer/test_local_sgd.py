from __future__ import annotations

import numpy as np
import pytest

from gpuctl import LocalSGD
from tests.trainers.rank_scripts import training_apart
from tests.trainers.ranks import run
from tests.trainers.strategies.outer.test_diloco import close


def test_a_mean_after_every_step_of_sgd_is_synchronous_sgd() -> None:
    told = run(3, training_apart.trained, LocalSGD(1), 8)
    expected = run(3, training_apart.exactly, 8)[0]
    assert close(told[0][-1], expected)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_mean_of_the_weights_after_every_few_steps(workers: int) -> None:
    told = run(workers, training_apart.trained, LocalSGD(4), 12)
    expected = training_apart.by_the_paper(workers, 4, 12, 1.0, 0.0)
    for found in told:
        assert all(close(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_averages_of_batch_norm_become_one() -> None:
    told = run(2, training_apart.with_batch_norm, 3)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "0.weight"):
        apart = [of["alone"][name] for of in told]
        assert name == "1.num_batches_tracked" or not np.array_equal(*apart)
        for of in told:
            assert np.allclose(of["together"][name], sum(apart) / 2, 0, 1e-12)
