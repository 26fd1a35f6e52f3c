"""Random number generators, kept and set."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from gpuctl.trainers.plain import pack, unpack
from gpuctl.trainers.rng import rng_state, set_rng_state


def draws() -> list[float]:
    normal = random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(()))  # each keeps half a pair in hand
    return [*normal, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_every_generator_goes_on_where_it_was() -> None:
    draws()
    state = json.loads(json.dumps(pack(rng_state(), "rng", {})))
    expected = draws() + draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert draws() + draws() != expected
    set_rng_state(unpack(state, {}))
    assert draws() + draws() == expected
