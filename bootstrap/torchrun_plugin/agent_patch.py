"""What a rendezvous alone cannot do for torchrun's agent.

The agent looks at its workers first, and asks the rendezvous only if they are well. But a node that is lost makes the
workers of all others fail within moments: that would cost each of them a restart, or the job at ``--max-restarts 0``.
So three methods of ``LocalElasticAgent`` ask the rendezvous first, where it is ours. They are not public; their
signatures are the same in torch 2.9 to 2.13 (decision 0022), and are looked at before anything is changed.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gpuctl.cluster.errors import BadInput

_EXPECTED = {
    "_monitor_workers": ["self", "worker_group"],
    "_initialize_workers": ["self", "worker_group"],
    "_shutdown": ["self", "death_sig"],
}
"""Their first parameters."""


class _Rendezvous(Protocol):
    def judged(self, result: Any) -> Any: ...

    def has_changed(self) -> bool: ...

    def take_notice(self, source: str) -> None: ...

    def leave(self) -> None: ...


def install(ours: type[_Rendezvous]) -> None:
    """Change the agent's class for handlers of the type ``ours``, once. Raises ``BadInput`` for another torch."""
    if LocalElasticAgent._monitor_workers.__module__ == __name__:
        return
    for name, expected in _EXPECTED.items():
        method = getattr(LocalElasticAgent, name, None)
        found = list(inspect.signature(method).parameters) if method is not None else []
        if found[: len(expected)] != expected:
            raise BadInput("this torch's agent is not known to gpuctl", "use torch 2.9 to 2.13, or another backend")
    monitor, initialize, shutdown = (getattr(LocalElasticAgent, name) for name in _EXPECTED)

    def monitored(self: Any, worker_group: Any) -> Any:
        result, handler = monitor(self, worker_group), worker_group.spec.rdzv_handler
        return handler.judged(result) if isinstance(handler, ours) else result

    def initialized(self: Any, worker_group: Any) -> None:
        """Until the nodes have met in a store whose host stays."""
        handler = worker_group.spec.rdzv_handler
        while True:
            try:
                return initialize(self, worker_group)  # type: ignore[no-any-return]
            except DistError:
                if not isinstance(handler, ours) or not handler.has_changed():
                    raise

    def shut_down(self: Any, *args: Any, **options: Any) -> None:
        """With a signal as its argument the agent is to end; else it only stops its workers."""
        handler = self._worker_group.spec.rdzv_handler
        leaves = isinstance(handler, ours) and bool(args or "death_sig" in options)
        if leaves:
            handler.take_notice("torchrun was asked to end")
        shutdown(self, *args, **options)
        if leaves:
            handler.leave()

    for name, method in zip(_EXPECTED, (monitored, initialized, shut_down), strict=True):
        setattr(LocalElasticAgent, name, method)
