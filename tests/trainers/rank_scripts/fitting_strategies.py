"""What the ranks of the tests of ``Trainer(strategy=…)`` run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from gpuctl import Checkpointer, Trainer
from tests.trainers.rank_scripts.fitting import network, samples


def fit(strategy: Any, options: dict[str, Any]) -> tuple[dict[str, Tensor], float, float]:
    """The weights at the end, and the losses of this rank in the first and the last step."""
    model, losses = network(), []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(output, target)
        losses.append(float(found))
        return found

    _trainer(model, loss, strategy, options).fit()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, losses[0], losses[-1]


def state(strategy: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What the strategy remembers once the run is restored."""
    _trainer(network(), nn.functional.cross_entropy, strategy, options).fit()
    found: dict[str, Any] = strategy.state_dict()
    return found


def left_over(strategy: Any, options: dict[str, Any]) -> list[float]:
    """How large what this rank has not sent is in the end, of each matrix."""
    _trainer(network(), nn.functional.cross_entropy, strategy, options).fit()
    return [float(strategy.residual[name].norm()) for name in sorted(strategy.residual)]


def logged(strategy: Any, options: dict[str, Any]) -> list[tuple[int, float]]:
    """Steps and losses that this rank has logged."""
    found: list[tuple[int, float]] = []
    with mock.patch("gpuctl.trainers.trainer.log_metrics", lambda step, **told: found.append((step, told["loss"]))):
        _trainer(network(), nn.functional.cross_entropy, strategy, options).fit()
    return found


def scheduled(strategy: Any, steps: int) -> tuple[int, list[float]]:
    """The steps that were made, and the rate at each boundary. The second rank seems twice as fast."""
    model, at, rates = network(), 0.0, []
    optimizer = SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    strategy._clock = lambda: at

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal at
        at += 0.1 if dist.get_rank() else 0.2
        return nn.functional.cross_entropy(output, target)

    trainer = Trainer(
        model, loss, optimizer, samples(), global_batch=12, steps=steps, scheduler=schedule, strategy=strategy
    )
    with mock.patch.object(Checkpointer, "step", lambda *_: rates.append(optimizer.param_groups[0]["lr"])):
        return trainer.fit().steps, rates


def with_an_unused_parameter(strategy: Any) -> None:
    class First(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self[0](inputs)
            return found

    model = First(nn.Linear(8, 3), nn.Linear(3, 3)).double()
    _trainer(model, nn.functional.cross_entropy, strategy, {}).fit()


def without_parameters() -> None:
    _trainer(nn.Tanh(), nn.functional.cross_entropy, None, {}, [nn.Parameter(torch.zeros(1))])


def by_hand() -> dict[str, Tensor]:
    """``SGD`` at 0.5, halved after each of three steps."""
    from gpuctl.trainers.data.sampling import Sampling

    model, data = network(), samples()
    for step in range(3):
        inputs, targets = data[Sampling(len(data), 7, 5).batch(step)]
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.5 * 0.5**step * parameter.grad)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _trainer(model: nn.Module, loss: Any, strategy: Any, options: dict[str, Any], parameters: Any = None) -> Trainer:
    return Trainer(
        model,
        loss,
        SGD(parameters or model.parameters(), 0.5),
        samples(),
        **{"global_batch": 12, "steps": 3, "seed": 5, "log_every": 1, "strategy": strategy, **options},
    )
