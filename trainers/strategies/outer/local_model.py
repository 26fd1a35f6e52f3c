"""``LocalModel``: one worker's copy of the model, and the weights that all of them had at the last boundary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.state.state_tensors import WRAPPERS


class LocalModel:
    """``model``, whose trained parameters go by their names without the compiler's prefixes.

    ``method`` is named in messages. Raises ``BadInput`` for a model whose weights are not this worker's own and whole.
    """

    def __init__(self, model: nn.Module, method: str) -> None:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                raise BadInput(
                    f"{method} averages weights now and then, and DDP gradients in each step",
                    "give it the model without DDP",
                )
            if isinstance(module, FSDPModule | FullyShardedDataParallel):
                raise BadInput(f"the model is sharded, and {method} averages whole weights", "leave out FSDP")
        self.model = model
        self._method = method
        trained = self._trained()
        if not trained:
            raise BadInput(
                f"{type(model).__name__} has no parameters that require a gradient", "there is nothing to train in it"
            )
        self.names = list(trained)
        self._attached = trained
        self._parameters = [torch.view_as_real(p.detach()) if p.is_complex() else p for p in trained.values()]
        self.theta: list[Tensor] = []
        """The weights of the last boundary, in 32 bits at least, in the order of ``names``."""
        self.take_weights({})

    @property
    def batch_norm(self) -> str | None:
        """The name of a layer's class that takes averages over what a worker sees, if there is one."""
        return next((type(module).__name__ for module in self.model.modules() if isinstance(module, _BatchNorm)), None)

    def everything(self) -> dict[str, Tensor]:
        """All parameters, those that are not trained among them."""
        return {_bare_name(name): parameter for name, parameter in self.model.named_parameters()}

    def take_weights(self, wider: Mapping[str, Tensor]) -> None:
        """θ is what the model has now; for those in ``wider``, what they are there."""
        self.check_names(wider)
        self.theta = [
            wider.get(name, parameter.detach()).to(
                parameter.device, torch.promote_types(parameter.dtype, torch.float32), copy=True
            )
            for name, parameter in zip(self.names, self._parameters, strict=True)
        ]

    def wider_weights(self) -> dict[str, Tensor]:
        """θ of the parameters that are narrower than it."""
        every = zip(self.names, self.theta, self._parameters, strict=True)
        return {name: theta for name, theta, parameter in every if theta.dtype != parameter.dtype}

    def deltas(self) -> list[Tensor]:
        """Δᵢ = θ − θᵢ: what this worker has learned, as a gradient. It began with θ as wide as its own weights are."""
        every = zip(self.theta, self._parameters, strict=True)
        return [theta.to(parameter.dtype).to(theta.dtype) - parameter for theta, parameter in every]

    def averages(self) -> list[Tensor]:
        """Buffers that are saved and that training changes: real numbers, and BatchNorm's counts; in 64 bits."""
        return [buffer.double() for buffer in self._buffers()]

    def become_theta(self, averages: list[Tensor]) -> None:
        """θᵢ ← θ, and buffers from their averages."""
        for theta, parameter in zip(self.theta, self._parameters, strict=True):
            parameter.copy_(theta)
        for buffer, average in zip(self._buffers(), averages, strict=True):
            buffer.copy_(average if buffer.is_floating_point() else average.round())

    def check_names(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ``BadInput`` unless ``tensors`` of a checkpoint go with the model's parameters."""
        shapes = {name: list(parameter.shape) for name, parameter in zip(self.names, self._parameters, strict=True)}
        for name, tensor in tensors.items():
            if shapes.get(name) != list(tensor.shape):
                raise BadInput(
                    f"the checkpoint's strategy remembers {list(tensor.shape)} values of {name!r}, and the model "
                    f"trains {shapes.get(name, 'no such parameter')}",
                    "use the model that the checkpoint was made with",
                )

    def check_trained(self) -> None:
        """Raises ``BadInput`` if other parameters are trained than at first: those would part for ever."""
        now = self._trained()
        for name in sorted(now.keys() ^ set(self.names)):
            is_new = name in now
            raise BadInput(
                f"parameter {name!r} is {'' if is_new else 'no longer '}trained, which it was{' not' * is_new} when "
                f"{self._method} was attached",
                "freeze parameters before attach()",
            )
        for name, parameter in now.items():
            if parameter is not self._attached[name]:
                raise BadInput(
                    f"parameter {name!r} is not the one that {self._method} was attached to",
                    "load weights before attach(), and without assign=True",
                )

    def _trained(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self.everything().items() if parameter.requires_grad}

    def _buffers(self) -> list[Tensor]:
        saved = self.model.state_dict(keep_vars=True)
        return [
            buffer
            for name, buffer in self.model.named_buffers()
            if name in saved and (buffer.is_floating_point() or name.endswith("num_batches_tracked"))
        ]


def _bare_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
