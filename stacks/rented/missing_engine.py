"""The engine where Pulumi's Python package is missing: it knows nothing, and keeps no ``down`` from removing by tag."""

from __future__ import annotations

from typing import Any, NoReturn

import psutil

from gpuctl.stacks.clouds.extras import NotInstalled
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.request import last_request


class MissingEngine:
    """In place of the ``Engine`` of ``cluster``: every verb fails with what is missing."""

    def __init__(self, cluster: str, missing: NotInstalled) -> None:
        self._cluster = cluster
        self._missing = missing

    def _fail(self, *_: object, **__: object) -> NoReturn:
        raise StackFailed(FailureKind.NO_CLI, self._missing.message, self._missing.hint)

    up: Any = _fail
    refresh: Any = _fail
    destroy: Any = _fail
    unknown: Any = _fail
    forget_unknown: Any = _fail
    outputs: Any = _fail
    resources: Any = _fail

    def forget(self) -> None:
        """Delete the state, if it is on this machine: nothing of the cluster is there any more."""
        last_request.forget_all(self._cluster)

    def orphaned_plugins(self) -> list[psutil.Process]:
        """None that could be told from others."""
        return []
