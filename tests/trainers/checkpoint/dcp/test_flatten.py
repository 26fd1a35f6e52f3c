"""DCP's names of what is in a state, and ours."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from gpuctl.cluster.checkpoints.treespec import tensor_names
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.dcp.flatten import leaves, nested
from gpuctl.trainers.checkpoint.state.treespec import flatten_state, unflatten_state
from tests.trainers.rank_scripts.checkpointing import same

KEYS = st.text("abc", min_size=1, max_size=2) | st.integers(0, 3)
STATES = st.dictionaries(
    st.text("xyz", min_size=1, max_size=2),
    st.recursive(
        st.none() | st.integers(0, 9) | st.just(torch.ones(2)) | st.binary(max_size=2),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
            | st.dictionaries(st.text("c", max_size=1), st.integers(0, 3), max_size=2).map(Counter)
        ),
        max_leaves=12,
    ),
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(STATES)
def test_both_find_the_same_leaves_and_put_them_together_alike(state: dict[str, Any]) -> None:
    try:
        flat, paths = flatten_state_dict(state)
        tensors: dict[str, torch.Tensor] = {}
        treespecs = {item: flatten_state(value, item, tensors) for item, value in state.items()}
    except (ValueError, BadInput):
        return  # keys that are the same as text
    found = {path: leaf for item, treespec in treespecs.items() for path, leaf in leaves(treespec, (item,))}
    assert set(found) == set(paths.values())
    for name, path in paths.items():
        assert same(unflatten_state(found[path], tensors), flat[name]), name
        assert not isinstance(flat[name], torch.Tensor) or tensor_names(found[path]) == [name]
    again = {
        item: unflatten_state(treespec, tensors) for item, treespec in json.loads(json.dumps(nested(found))).items()
    }
    assert same(again, unflatten_state_dict(flat, paths))


@pytest.mark.parametrize(
    ("found", "name"),
    [({("a",): 1, ("a", "b"): 2}, "a.b"), ({("a", "b"): 2, ("a",): 1}, "a"), ({("a", "b"): 1, ("a", 0): 2}, "a.0")],
)
def test_what_is_not_alike_on_all_ranks_is_named(found: dict[Any, Any], name: str) -> None:
    with pytest.raises(BadInput, match=f"'{name}' of the state to save differs between ranks"):
        nested(found)
