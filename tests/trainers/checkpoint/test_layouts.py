"""A training goes on in another layout and on another number of ranks, and computes what it would have computed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpuctl import Checkpointer
from gpuctl.cluster.errors import BadInput
from tests.trainers.rank_scripts.checkpointing import kept, same
from tests.trainers.ranks import run

STEPS = 3
WAY = [("ddp", 4), ("fsdp", 2), ("ddp", 3), ("hsdp", 4), ("ddp", 2), ("fsdp", 3), ("ddp", 4)]
"""Layouts, and on how many ranks: each goes on from the one before."""

Learner = tuple[nn.Module, torch.optim.Optimizer]


class Model(nn.Module):
    """Nothing in it can be cut evenly by 2, 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.hidden = nn.Linear(7, 13)
        self.head = nn.Linear(13, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.hidden(self.norm(self.embedding(tokens))).relu())
        return scores


def learner(layout: str, seed: int) -> Learner:
    torch.manual_seed(seed)
    inner = Model()
    decayed = [p for p in inner.parameters() if p.dim() > 1]
    rest = [p for p in inner.parameters() if p.dim() == 1]
    model: nn.Module = inner
    if layout == "ddp":
        model = DistributedDataParallel(inner)
    elif layout != "alone":
        world = dist.get_world_size()
        grid = (2, world // 2) if layout == "hsdp" else (world,)
        names = ("copies", "shards")[-len(grid) :]
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=names)
        for part in (inner.embedding, inner.hidden, inner):
            fully_shard(part, mesh=mesh)
        decayed = [p for p in inner.parameters() if p.dim() > 1]
        rest = [p for p in inner.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]
    return model, torch.optim.AdamW(groups, 1e-2, weight_decay=0.0)


def train(of: Learner, first: int, steps: int = STEPS) -> None:
    """All ranks see the same samples, so every world computes the same gradients but for how their mean is rounded."""
    model, optimizer = of
    for step in range(first, first + steps):
        tokens = torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens % 5).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9


def whole(of: Learner) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the optimizer's state, gathered by torch. Only rank 0 gets them."""
    return get_state_dict(*of, options=StateDictOptions(full_state_dict=True, cpu_offload=dist.is_initialized()))


def begin(url: str, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    of = learner(layout, 0)
    train(of, 0)
    kept(Checkpointer(url), STEPS, {"model": of[0], "optimizer": of[1]})
    return whole(of)


def go_on(url: str, layout: str, handed: tuple[dict[str, Any], dict[str, Any]]) -> tuple[bool, bool, Any]:
    """Whether what is restored is what the others had, and whether it learns to the last bit what is learned by a model
    that got their state without any checkpoint; and what that is."""
    handed = copy.deepcopy(handed)  # tensors among arguments are in memory that all ranks share
    of, other = learner(layout, 1), learner(layout, 2)
    train(of, 100)
    checkpointer = Checkpointer(url)
    step = checkpointer.restore({"model": of[0], "optimizer": of[1]}) or 0
    restored = whole(of)
    came_back = dist.get_rank() != 0 or same(list(restored), list(handed))
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(*other, model_state_dict=handed[0], optim_state_dict=handed[1], options=options)
    for each in (of, other):
        train(each, step)
    learned = whole(of)
    alike = same(_local(of), _local(other))
    checkpointer.save(step + STEPS, {"model": of[0], "optimizer": of[1]})
    checkpointer.wait()
    return came_back, alike, learned


def _local(of: Learner) -> Any:
    """What this rank has."""
    model, optimizer = of
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    state = [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]
    return [{name: getattr(t, "to_local", lambda t=t: t)() for name, t in each.items()} for each in (tensors, *state)]


@pytest.mark.slow
def test_a_training_goes_on_in_every_layout_and_computes_the_same(file_url: str) -> None:
    reference = learner("alone", 0)
    train(reference, 0)
    handed = run(WAY[0][1], begin, file_url, WAY[0][0])[0]
    for number, (layout, world) in enumerate(WAY[1:], 1):
        told = run(world, go_on, file_url, layout, handed)
        handed = told[0][2]
        assert [(came_back, alike) for came_back, alike, _ in told] == [(True, True)] * world, WAY[: number + 1]
        train(reference, number * STEPS)
        weights, state = whole(reference)
        for name, tensor in weights.items():
            torch.testing.assert_close(handed[0][name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name} at {WAY[number]}")
        assert same(handed[1]["param_groups"], state["param_groups"])
    assert handed[1]["state"]["head.weight"]["step"] == STEPS * len(WAY)


# -- what no single model has: an optimizer over two, averages, an object of one's own --------------------------------


class Average:
    """An object with a state dict that holds shards wherever the weights are shards."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._kept = [torch.zeros_like(weight.detach()) for weight in weights]

    def update(self, weights: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self._kept, weights, strict=True):
            mine.lerp_(theirs.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state["kept"]


def pair(layout: str, seed: int) -> dict[str, Any]:
    """An encoder, and a decoder with a layer that is never used, under one optimizer."""
    torch.manual_seed(seed)
    encoder, decoder = nn.Linear(5, 7), nn.ModuleList([nn.Linear(7, 3), nn.Linear(2, 2)])
    if layout == "fsdp":
        for model in (encoder, *decoder):
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = [*encoder.parameters(), *decoder.parameters()]
    averages = [torch.zeros_like(weight.detach()) for weight in weights]
    return {
        "encoder": encoder,
        "decoder": decoder,
        "optimizer": torch.optim.AdamW(weights, 1e-2),
        "averages": averages,
        "average": Average(weights),
    }


def train_pair(state: dict[str, Any], steps: int = 2) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["decoder"][0](state["encoder"](torch.ones(4, 5))).square().mean().backward()
        state["optimizer"].step()
        weights = [*state["encoder"].parameters(), *state["decoder"].parameters()]
        state["average"].update(weights)
        for mine, theirs in zip(state["averages"], weights, strict=True):
            mine.lerp_(theirs.detach(), 0.5)


def whole_pair(state: dict[str, Any]) -> list[Tensor]:
    weights = [*state["encoder"].parameters(), *state["decoder"].parameters()]
    moments = [state["optimizer"].state[w]["exp_avg"] for w in weights if w in state["optimizer"].state]
    tensors = [*weights, *moments, *state["averages"], *state["average"].state_dict()["kept"]]
    return [getattr(t.detach(), "full_tensor", lambda t=t: t.detach())() for t in tensors]


def go_on_with_pair(url: str, layout: str, seed: int) -> list[Tensor]:
    state, checkpointer = pair(layout, seed), Checkpointer(url)
    step = checkpointer.restore(state) or 0
    train_pair(state)
    kept(checkpointer, step + 2, state)
    return whole_pair(state)


@pytest.mark.slow
def test_what_no_single_model_has_goes_on_in_every_layout(file_url: str) -> None:
    reference = pair("alone", 0)
    for seed, (layout, world) in enumerate([("fsdp", 2), ("fsdp", 3), ("alone", 2), ("fsdp", 2), ("alone", 1)]):
        train_pair(reference)
        for told in run(world, go_on_with_pair, file_url, layout, seed):
            torch.testing.assert_close(told, whole_pair(reference), rtol=1e-4, atol=1e-6, msg=f"{layout} on {world}")


def refused_with_shards(url: str) -> list[tuple[bool, str]]:
    """Of an optimizer whose step needs a closure, and of one that only says so in its step: whether it is saved, and
    what is said."""
    said = []
    for kind in (torch.optim.LBFGS, Refusing):
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        state = {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}
        saved = False
        try:
            kept(Checkpointer(f"{url}-{kind.__name__}"), 1, state)
            saved = True
            Checkpointer(f"{url}-{kind.__name__}").restore(state)
        except BadInput as error:
            said.append((saved, str(error)))
    return said


class Refusing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("it takes a closure")


def test_an_optimizer_whose_step_needs_a_closure_is_not_for_shards(file_url: str) -> None:
    of = "'optimizer' of the state cannot be loaded into shards"
    what_to_do = "use whole parameters (DDP), or leave it out of the state"
    assert run(2, refused_with_shards, file_url) == 2 * [
        [
            (False, f"{of}: LBFGS.step needs a closure; {what_to_do}"),
            (True, f"{of}: Refusing.step without a closure raises RuntimeError('it takes a closure'); {what_to_do}"),
        ]
    ]
