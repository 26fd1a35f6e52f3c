"""What a checkpoint keeps of models and optimizers that are not as plain as a first example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from gpuctl import Checkpointer
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.state.state_tensors import contents_of
from tests.trainers.rank_scripts.checkpointing import kept, same


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
            r"optimizer\.state\.used\.weight\.step is absent in the checkpoint and float32\[\] here",
        ),
        (
            (torch.optim.Adam, {}),
            (torch.optim.SGD, {}),
            r"optimizer\.state\.used\.weight\.step is float32\[\] in the checkpoint and absent here",
        ),
        (
            (torch.optim.SGD, {}),
            (torch.optim.Adam, {}),
            r"belongs to another optimizer: 'optimizer' has no amsgrad, betas",
        ),
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


class Renaming(nn.Linear):
    """As torch's own wrappers do it: its state dict has a name for its weight that the module does not know."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"shown": "weight"}


def compiled(model: nn.Module) -> nn.Module:
    found: Any = torch.compile(model, backend="eager")
    assert isinstance(found, nn.Module)
    return found


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "compiled": compiled,
    "compiled within": lambda model: nn.Sequential(compiled(model)),
    "checkpointed": checkpoint_wrapper,
    "renamed": lambda model: nn.Sequential(model, Renaming(2, 2)),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_the_names_of_a_model_are_those_that_torch_gives_it_however_it_is_wrapped(wrapped: str, file_url: str) -> None:
    state = {"model": WRAPPED[wrapped](TwoHeads())}
    names = get_model_state_dict(state["model"])
    assert set(contents_of(state, 0).tensors) == {f"model.{name}" for name in names}
    kept(Checkpointer(file_url), 1, state)
    before = _weights(state)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    assert Checkpointer(file_url).restore(state) == 1
    assert _equal(_weights(state), before)


def test_a_buffer_that_is_expanded_is_saved_and_refused_by_name_where_it_would_be_loaded(file_url: str) -> None:
    def made(expanded: bool) -> nn.Module:
        model = nn.Linear(2, 2)
        mask = torch.arange(3).expand(2, 3)
        model.register_buffer("mask", mask if expanded else torch.zeros_like(mask).contiguous())
        return model

    kept(Checkpointer(file_url), 1, {"model": made(expanded=True)})
    with pytest.raises(BadInput, match=r"'model\.mask' is an expanded tensor, which cannot be loaded into; clone"):
        Checkpointer(file_url).restore({"model": made(expanded=True)})
    model = made(expanded=False)
    assert Checkpointer(file_url).restore({"model": model}) == 1
    assert torch.equal(model.get_buffer("mask"), torch.arange(3).expand(2, 3))


def test_two_items_whose_tensors_have_one_name_are_refused(file_url: str) -> None:
    net = nn.ModuleDict({"ema": nn.Linear(2, 2)})
    with pytest.raises(
        BadInput, match=r"'net' and 'net\.ema' of the state both have a tensor 'net\.ema\.weight'; rename"
    ):
        Checkpointer(file_url).save(1, {"net": net, "net.ema": nn.Linear(2, 2)})
    kept(Checkpointer(file_url), 1, {"net": net, "net.ema": 0.99})


class Sam(torch.optim.SGD):
    """As sharpness-aware minimization is written: a step of two passes, and nothing without a closure."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.detach().clone()
        with torch.enable_grad():
            closure()
        super().step()


CLOSURES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.LBFGS, {"history_size": 3, "max_iter": 2}),
    (Sam, {"momentum": 0.9}),
]


def _step_by_closure(state: dict[str, Any]) -> None:
    def closure() -> Tensor:
        state["optimizer"].zero_grad()
        loss: Tensor = state["model"](torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    state["optimizer"].step(closure)


@pytest.mark.parametrize(("kind", "options"), CLOSURES)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_whose_step_needs_a_closure_goes_on_as_it_was(
    file_url: str, kind: type[torch.optim.Optimizer], options: dict[str, Any], steps: int
) -> None:
    state, fresh, used = (_learner(kind, **options) for _ in range(3))
    for _ in range(steps):
        _step_by_closure(state)
    kept(Checkpointer(file_url), steps, state)
    _step_by_closure(used)
    for restored in (fresh, used):
        assert Checkpointer(file_url).restore(restored) == steps
        assert same(restored["optimizer"].state_dict(), state["optimizer"].state_dict())
    for _ in range(2):
        for learner in (state, fresh, used):
            _step_by_closure(learner)
    assert _equal(_weights(fresh), _weights(state))
    assert _equal(_weights(used), _weights(state))


@pytest.mark.parametrize(("kind", "options"), CLOSURES)
def test_an_optimizer_whose_step_needs_a_closure_takes_no_other_ones_state_and_is_left_as_it_was(
    file_url: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    state, other = _learner(), _learner(kind, **options)
    _step(state["model"], state["optimizer"])
    kept(Checkpointer(file_url), 1, state)
    before = other["optimizer"].state_dict()
    with pytest.raises(BadInput, match="belongs to another optimizer: 'optimizer' has no "):
        Checkpointer(file_url).restore(other)
    assert other["optimizer"].state_dict() == before
    assert all(p.grad is None for p in other["model"].parameters())


def test_a_plain_tensor_is_loaded_though_what_holds_its_place_has_no_memory_or_cannot_be_kept(file_url: str) -> None:
    kept(Checkpointer(file_url), 1, {"average": torch.arange(3.0), "best": [torch.ones(2)]})
    state = {"average": torch.empty(3, device="meta"), "best": object()}
    assert Checkpointer(file_url).restore(state) == 1
    assert same(state, {"average": torch.arange(3.0), "best": [torch.ones(2)]})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_plain_tensor_comes_back_on_the_gpu_that_it_was_on(file_url: str) -> None:
    kept(Checkpointer(file_url), 1, {"average": torch.arange(3.0).cuda(), "array": np.arange(3)})
    state: dict[str, Any] = {"average": torch.zeros(3).cuda(), "array": torch.zeros(3).cuda()}
    assert Checkpointer(file_url).restore(state) == 1
    assert state["average"].is_cuda
    assert same(state["average"].cpu(), torch.arange(3.0))
    assert state["array"].tolist() == [0, 1, 2]
