"""State dicts as JSON and tensors."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.cluster.checkpoints.treespec import tensor_names
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.state.treespec import flatten_state, unflatten_state

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=20,
)


def kept(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    treespec = json.loads(json.dumps(flatten_state(value, "state", tensors)))
    assert tensor_names(treespec) == list(tensors)
    return unflatten_state(treespec, tensors)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = kept(value)
    assert back == value
    assert repr(back) == repr(value)  # True is not 1, a tuple not a list, -0.0 not 0.0


def test_tensors_go_by_their_dotted_names() -> None:
    tensors: dict[str, torch.Tensor] = {}
    weight = torch.ones(2)
    flatten_state({"layers": [{"weight": weight}], 3: (weight + 1,)}, "model", tensors)
    assert list(tensors) == ["model.layers.0.weight", "model.3.0"]
    assert tensors["model.layers.0.weight"] is weight


def test_arrays_and_numpy_scalars_come_back() -> None:
    back = kept({"array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.int64(7), "float": np.float32(0.5)})
    assert back["array"].dtype == np.int16
    assert back["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (back["scalar"], back["float"]) == (7, 0.5)


def test_numbers_that_json_lacks_come_back() -> None:
    back = kept([math.inf, -math.inf, math.nan, 1e-323, 2**100])
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert back[3:] == [1e-323, 2**100]


def test_an_ordered_dict_keeps_its_order() -> None:
    assert list(kept(OrderedDict(z=1, a=2))) == ["z", "a"]


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, 1j, np.array(["text"]), torch.float32])
def test_what_a_checkpoint_cannot_hold_is_named(value: object) -> None:
    with pytest.raises(BadInput, match=r"'state\.inner\.1' of the state to save"):
        flatten_state({"inner": [1, value]}, "state", {})


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(BadInput, match=r"both called 'state\.a\.b'"):
        flatten_state({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "state", {})
