"""The entry point in ``torchrun.handlers``.

Every torchrun on a machine with gpuctl imports this module and calls ``register``, whatever its backend is. So it
imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def register() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What makes a handler. Its name is that of the entry point."""
    return _created


def _created(params: RendezvousParameters) -> RendezvousHandler:
    from gpuctl.bootstrap.torchrun_plugin.handler import created

    return created(params)
