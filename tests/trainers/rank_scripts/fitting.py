"""What the ranks of the ``Trainer`` tests run: a small network that is fitted, and losses that disturb it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from gpuctl import Trainer
from gpuctl.trainers.data.sampling import Sampling
from tests.waiting import until

Loss = Callable[[Tensor, Tensor], Tensor]


def network(dropout: float = 0.0, width: int = 16) -> nn.Module:
    """In double precision, so that a sum in another order is the same to ten digits; the same on every rank."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(8, width),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 3),
    )
    return nn.Sequential(*layers).double()


def samples(count: int = 41) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def trainer(model: nn.Module, loss: Loss | None = None, data: Dataset[Any] | None = None, **options: Any) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    settings = {"global_batch": 7, "steps": 12, "seed": 5, "log_every": 1, **options}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    return Trainer(
        model, loss or nn.functional.cross_entropy, optimizer, data or samples(), scheduler=scheduler, **settings
    )


def fit(options: dict[str, Any], dropout: float = 0.0, loss: Loss | None = None, width: int = 16) -> dict[str, Tensor]:
    """The weights at the end."""
    model = network(dropout, width)
    trainer(model, loss, **options).fit()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(options: dict[str, Any]) -> list[Tensor]:
    """Those of the first step, as the optimizer met them."""
    model = network()
    trainer(model, steps=1, **options).fit()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def whole_gradients(batch: int) -> list[Tensor]:
    """The same, by one pass over the global batch."""
    model = network()
    whole_loss(batch, model).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def whole_loss(batch: int, model: nn.Module | None = None) -> Tensor:
    data = samples()
    inputs, targets = data[Sampling(len(data), batch, 5).batch(0)]
    return nn.functional.cross_entropy((model or network())(inputs), targets)


def evaluated(count: int) -> float:
    model = nn.Sequential(nn.BatchNorm1d(8), network()).double()
    fitting = trainer(model)
    fitting.fit()
    return fitting.evaluate(samples(count), lambda output, target: output.argmax(1) == target, batch=4)


def half(precision: str) -> tuple[list[torch.dtype], set[torch.dtype], float, float]:
    """The types that the loss met, those of the weights, and the losses of the first and the last step."""
    model, met, losses = network().float(), set(), []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        met.add(output.dtype)
        found = nn.functional.cross_entropy(output, target)
        losses.append(float(found))
        return found

    data = samples()
    trainer(model, loss, TensorDataset(data.tensors[0].float(), data.tensors[1]), precision=precision, steps=60).fit()
    return list(met), {p.dtype for p in model.parameters()}, losses[0], losses[-1]


class Killing:
    """A loss that ends its process in the ``at``-th call, on one rank; if ``after`` is given, once that file exists."""

    def __init__(self, rank: int, at: int, after: str | None = None) -> None:
        self._rank = str(rank)
        self._left = at
        self._after = after

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0 and os.environ["RANK"] == self._rank:
            if self._after is not None:
                until(Path(self._after).exists, self._after)
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(output, target)


class Waiting:
    """A loss that waits in its ``at``-th call until the file ``go`` exists."""

    def __init__(self, at: int, go: str) -> None:
        self._left = at
        self._go = Path(go)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            until(self._go.exists, f"{self._go}")
        return nn.functional.cross_entropy(output, target)


class Listed(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set that is no ``TensorDataset``."""

    def __init__(self) -> None:
        self._all = samples()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self._all[index]
        return inputs, target


def records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)
