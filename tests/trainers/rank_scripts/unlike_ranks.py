"""What the ranks of the share tests run: states that are not alike on all ranks, or not from save to save."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from gpuctl import Checkpointer
from tests.trainers.rank_scripts.checkpointing import kept


def save_what_becomes_alike(url: str) -> None:
    """At step 1 rank 1 lacks a part of the state, at step 2 it has it."""
    torch.manual_seed(0)
    model, extra = nn.Linear(64, 64), nn.Linear(256, 64)
    checkpointer = Checkpointer(url, keep=None)
    kept(checkpointer, 1, {"model": model, "extra": extra} if dist.get_rank() == 0 else {"model": model})
    kept(checkpointer, 2, {"model": model, "extra": extra})


def twins(tied: bool, frozen: bool = False) -> nn.ModuleList:
    """Two layers of the same values, maybe of the same memory."""
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.arange(64.0 * 64).reshape(64, 64))
        second.weight.copy_(first.weight)
    if tied:
        second.weight = first.weight
    second.weight.requires_grad_(not frozen)
    return nn.ModuleList([first, second])


def save_seen_differently(url: str, by: int) -> None:
    """Rank ``by`` has one tensor under two names where the other has two, and alone trains all of them."""
    alone = dist.get_rank() == by
    last, best = torch.zeros(100), torch.ones(100)
    values = {"last": last, "best": last if alone else best}
    kept(Checkpointer(url), 1, {"model": twins(tied=alone), "other": twins(False, frozen=not alone), "values": values})


def save_frozen(url: str) -> None:
    """Two steps of a model of which only a little is trained."""
    torch.manual_seed(0)
    frozen, trained, checkpointer = nn.Linear(256, 256), nn.Linear(4, 4), Checkpointer(url)
    frozen.requires_grad_(False)
    for step in (1, 2):
        with torch.no_grad():
            trained.weight += 1
        kept(checkpointer, step, {"model": nn.Sequential(trained, frozen, nn.Linear(4, 4))})
