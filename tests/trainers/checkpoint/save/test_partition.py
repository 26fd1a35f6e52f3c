"""What is written once, and by whom, where that changes from save to save or from rank to rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpuctl import Checkpointer
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.trainers.checkpoint.save.partition import signature
from gpuctl.trainers.checkpoint.state.state_tensors import contents_of
from tests.trainers.checkpoint_checks import committed
from tests.trainers.rank_scripts import unlike_ranks
from tests.trainers.rank_scripts.checkpointing import kept, same
from tests.trainers.ranks import run


def test_an_average_that_begins_as_the_weights_themselves_is_kept_once_it_is_its_own(file_url: str) -> None:
    model, checkpointer = nn.Linear(4, 4), Checkpointer(file_url)
    average = dict(model.state_dict())
    kept(checkpointer, 1, {"model": model, "average": average})
    average = {name: tensor.clone() for name, tensor in average.items()}
    with torch.no_grad():
        model.weight += 100
    kept(checkpointer, 2, {"model": model, "average": average})

    found: dict[str, Any] = {"model": nn.Linear(4, 4), "average": None}
    assert Checkpointer(file_url).restore(found) == 2
    assert same(dict(found["model"].state_dict()), dict(model.state_dict()))
    assert same(found["average"], average)


def test_a_share_is_made_anew_when_memory_is_shared_or_frozen_otherwise() -> None:
    outlines = {
        signature(contents_of({"model": unlike_ranks.twins(tied, frozen)}, 0))
        for tied in (False, True)
        for frozen in (False, True)
    }
    assert len(outlines) == 4


@pytest.mark.slow
def test_ranks_that_hold_the_same_from_the_second_save_on_share_the_work_from_then_on(file_url: str) -> None:
    run(2, unlike_ranks.save_what_becomes_alike, file_url)
    found = {"model": nn.Linear(64, 64), "extra": nn.Linear(256, 64)}
    assert Checkpointer(file_url).restore(found) == 2


@pytest.mark.parametrize("by", [0, 1])
def test_what_is_one_tensor_on_one_rank_alone_is_written_as_two(file_url: str, by: int) -> None:
    run(2, unlike_ranks.save_seen_differently, file_url, by)
    found: dict[str, Any] = {"model": unlike_ranks.twins(False), "other": unlike_ranks.twins(False), "values": None}
    for item in ("model", "other"):
        for parameter in found[item].parameters():
            nn.init.zeros_(parameter)
    assert Checkpointer(file_url).restore(found) == 1
    for item in ("model", "other"):
        assert same(dict(found[item].state_dict()), dict(unlike_ranks.twins(False).state_dict()))
    best = torch.zeros(100) if by == 0 else torch.ones(100)
    assert same(found["values"], {"last": torch.zeros(100), "best": best})


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_parameters_are_not_written_again_with_what_is_trained(file_url: str, world: int) -> None:
    run(world, unlike_ranks.save_frozen, file_url)
    first, second = committed(open_bucket(file_url))
    assert first.written == first.bytes == second.bytes
    assert second.written < 64 * 1024 < 256 * 256 * 4 // world, "the generators of each rank, the values, a few weights"


def test_views_of_one_memory_that_read_it_otherwise_are_written_apart(file_url: str) -> None:
    numbers = torch.randn(5, dtype=torch.complex64)
    state = {"plain": numbers, "conjugated": numbers.conj(), "part": numbers.imag, "negated": numbers.conj().imag}
    square = torch.randn(4, 4)
    state |= {"square": square, "turned": square.t()}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    kept(Checkpointer(file_url), 1, state)
    found: dict[str, Any] = dict.fromkeys(state)
    assert Checkpointer(file_url).restore(found) == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
