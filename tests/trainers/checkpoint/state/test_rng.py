"""Random number generators, kept and set."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from gpuctl.trainers.checkpoint.state.rng import rng_state, set_rng_state
from gpuctl.trainers.checkpoint.state.treespec import flatten_state, unflatten_state


def draws() -> list[float]:
    normal = random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(()))  # each keeps half a pair in hand
    return [*normal, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_every_generator_goes_on_where_it_was() -> None:
    draws()
    state = json.loads(json.dumps(flatten_state(rng_state(), "rng", {})))
    expected = draws() + draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert draws() + draws() != expected
    set_rng_state(unflatten_state(state, {}))
    assert draws() + draws() == expected
