"""What a checkpoint keeps of models and optimizers that are not as plain as a first example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpuctl import Checkpointer
from gpuctl.cluster.errors import BadInput
from tests.trainers.bodies import kept


class TwoHeads(nn.Module):
    """Only one of the heads is ever used, as in a model whose parts are trained one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.idle = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.used(inputs)
        return output


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()


def _learner(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TwoHeads()
    return {"model": model, "optimizer": optimizer(model.parameters(), lr=0.1, **options)}


def _weights(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_saving_before_the_first_step_changes_nothing_and_restores_to_the_same_run(
    file_url: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    undisturbed, saved, restored = (_learner(kind, **options) for _ in range(3))
    kept(Checkpointer(file_url), 0, saved)
    assert len(saved["optimizer"].state) == 0
    assert all(p.grad is None for p in saved["model"].parameters())
    assert Checkpointer(file_url).restore(restored) == 0
    for state in (undisturbed, saved, restored):
        for _ in range(3):
            _step(state["model"], state["optimizer"])
    assert _equal(_weights(saved), _weights(undisturbed))
    assert _equal(_weights(restored), _weights(undisturbed))


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_parameter_that_no_gradient_came_to_has_no_state_before_and_after(
    file_url: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    state, restored = _learner(kind, **options), _learner(kind, **options)
    _step(state["model"], state["optimizer"])
    kept(Checkpointer(file_url), 1, state)
    assert Checkpointer(file_url).restore(restored) == 1
    known = {id(p): name for name, p in restored["model"].named_parameters()}
    with_state = {known[id(p)] for p, found in restored["optimizer"].state.items() if found}
    assert with_state <= {"used.weight", "used.bias"}
    for learner in (state, restored):
        _step(learner["model"], learner["optimizer"])
    assert _equal(_weights(restored), _weights(state))


def test_gradients_that_lie_about_keep_nothing_from_being_restored(file_url: str) -> None:
    state, restored = _learner(), _learner()
    _step(state["model"], state["optimizer"])
    kept(Checkpointer(file_url), 1, state)
    restored["model"](torch.ones(1, 2)).sum().backward()
    gradient = restored["model"].used.weight.grad
    assert Checkpointer(file_url).restore(restored) == 1
    assert restored["model"].used.weight.grad is gradient
    assert len(restored["optimizer"].state) == 2


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.Adam, {}),
            r"optimizer\.state\.used\.weight\.step is absent there and float32\[\] here",
        ),
        (
            (torch.optim.Adam, {}),
            (torch.optim.SGD, {}),
            r"optimizer\.state\.used\.weight\.step is float32\[\] there and absent here",
        ),
        ((torch.optim.SGD, {}), (torch.optim.Adam, {}), r"of another optimizer: 'optimizer' has no amsgrad, betas"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused_and_loads_nothing(
    file_url: str, there: tuple[Any, dict[str, Any]], here: tuple[Any, dict[str, Any]], said: str
) -> None:
    state, other = _learner(there[0], **there[1]), _learner(here[0], **here[1])
    _step(state["model"], state["optimizer"])
    kept(Checkpointer(file_url), 1, state)
    before = _weights(other)
    with pytest.raises(BadInput, match=said):
        Checkpointer(file_url).restore(other)
    assert _equal(_weights(other), before)


def test_a_frozen_layer_two_optimizers_and_their_groups_come_back(file_url: str) -> None:
    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        return {
            "first": torch.optim.AdamW(
                [{"params": model[1].weight, "lr": 0.5}, {"params": model[1].bias, "weight_decay": 0.0}], lr=0.1
            ),
            "second": torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.5),
            "model": model,
        }

    def step(state: dict[str, Any]) -> None:
        state["model"](torch.ones(1, 2)).square().sum().backward()
        for name in ("first", "second"):
            state[name].step()
            state[name].zero_grad()

    state, restored = made(), made()
    for _ in range(2):
        step(state)
    state["first"].param_groups[0]["lr"] = 0.25
    kept(Checkpointer(file_url), 2, state)
    assert Checkpointer(file_url).restore(restored) == 2
    assert [group["lr"] for group in restored["first"].param_groups] == [0.25, 0.1]
    for learner in (state, restored):
        step(learner)
    assert _equal(_weights(restored), _weights(state))


def test_a_module_without_any_tensor_may_be_part_of_a_state(file_url: str) -> None:
    state = {**_learner(), "loss": nn.CrossEntropyLoss()}
    kept(Checkpointer(file_url), 1, state)
    assert Checkpointer(file_url).restore({**_learner(), "loss": nn.CrossEntropyLoss()}) == 1


def test_a_buffer_that_is_expanded_is_saved_and_refused_by_name_where_it_would_be_loaded(file_url: str) -> None:
    def made(expanded: bool) -> nn.Module:
        model = nn.Linear(2, 2)
        mask = torch.arange(3).expand(2, 3)
        model.register_buffer("mask", mask if expanded else torch.zeros_like(mask).contiguous())
        return model

    kept(Checkpointer(file_url), 1, {"model": made(expanded=True)})
    with pytest.raises(BadInput, match=r"'model\.mask' is expanded here, so that nothing can be loaded into it; clone"):
        Checkpointer(file_url).restore({"model": made(expanded=True)})
    model = made(expanded=False)
    assert Checkpointer(file_url).restore({"model": model}) == 1
    assert torch.equal(model.get_buffer("mask"), torch.arange(3).expand(2, 3))
