"""``ErrorFeedback``: what was not sent of a gradient is added to the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from gpuctl.trainers.compression.codec import Codec


class ErrorFeedback:
    """The residuals eᵢ of one rank, by the names of parameters (Seide et al. 2014; Karimireddy et al. 2019,
    arXiv:1901.09847)::

        xᵢ = gᵢ + eᵢ          what there is to send
        eᵢ ← xᵢ − sent(xᵢ)    what of it was not

    So nothing is lost: in each step, over all ranks, what was sent and the new residuals are the gradients and the old
    residuals.
    """

    def __init__(self) -> None:
        self.residual: dict[str, Tensor] = {}

    def with_residual(self, name: str, gradient: Tensor) -> Tensor:
        """xᵢ, of shape (n,), in 32 bits at least."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if (residual := self.residual.get(name)) is not None:
            return gradient.reshape(-1).to(wide) + residual
        return gradient.reshape(-1).to(wide, copy=True)

    def keep(self, name: str, x: Tensor, codec: Codec, sent: Tensor) -> None:
        """Make ``x`` the residual, less what is in the bytes ``sent``."""
        x.neg_()
        codec.add(sent, x)
        self.residual[name] = x.neg_()
