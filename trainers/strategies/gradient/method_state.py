"""What a method remembers, as a checkpoint holds it: by the names of parameters, and the same for every world.

The sum that ranks have not sent yet is that of their residuals. If each of N′ new ranks begins with the mean of those
that N ranks had, what is to be sent on the mean is unchanged, for any N′.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.compression.reducers import exact_mean
from gpuctl.trainers.strategies.gradient.bucket_hook import BucketHook


def attached(hook: BucketHook | None) -> BucketHook:
    """Raises ``BadInput`` for a method that was not given a model yet."""
    if hook is None:
        raise BadInput("this strategy has no model yet", "attach() it before it is saved, restored or used")
    return hook


def check_free(hook: BucketHook | None) -> None:
    """Raises ``BadInput`` for a method that has a model already: it goes by names, which another model may have too."""
    if hook is not None:
        raise BadInput("this strategy exchanges the gradients of another model already", "make one for each model")


def mean_over_ranks(vectors: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The mean of each over all ranks; all of them make the call, with the same names."""
    names = sorted(vectors)
    means = {}
    for name in names:  # one by one: all of them together would take the memory of one more model
        (means[name],) = exact_mean([vectors[name]], group)
    return means


def loaded(vectors: Mapping[str, Tensor], hook: BucketHook) -> dict[str, Tensor]:
    """Copies of ``vectors`` where the parameters of their names are. Raises ``BadInput`` for another model's."""
    there = {}
    for name, vector in vectors.items():
        parameter = hook.parameters.get(name)
        if parameter is None or parameter.numel() != vector.numel():
            here = "no such parameter" if parameter is None else f"{parameter.numel()} values"
            raise BadInput(
                f"the checkpoint's strategy remembers {vector.numel()} values of {name!r}, and the model has {here}",
                "use the model that the checkpoint was made with",
            )
        there[name] = vector.to(parameter.device).clone()
    return there
