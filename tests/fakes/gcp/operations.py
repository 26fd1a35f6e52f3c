"""Operations of Google Cloud: what is asked for now is done later, and who wants to know looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fakes.gcp.api import PROJECT, URL

Answer = tuple[int, Any]
_CODES = {"ABORTED": 10, "FAILED_PRECONDITION": 9, "NOT_FOUND": 5}
"""google.rpc.Code"""
_REASONS = {"resourceInUseByAnotherResource": "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "notFound": "RESOURCE_NOT_FOUND"}
"""Compute Engine's own, in an operation's error."""


class Operations:
    """``looks``: how often one is looked at before it is done. 0: it is done before it is told of."""

    def __init__(self) -> None:
        self.looks = 0
        self.begun: list[str] = []
        """Their names, the oldest first."""
        self._open: dict[str, tuple[int, Callable[[], Answer]]] = {}
        self._ended: dict[str, Any] = {}

    def begin(self, name: str, do: Callable[[], Answer]) -> Answer:
        """``name``: with the place, and ending in ``operation`` as Compute Engine's do, or as Resource Manager's."""
        path = f"{name}-{len(self.begun) + 1}"
        self.begun.append(path)
        self._open[path] = (self.looks, do)
        if not self.looks:
            self._end(path, do)
        return 200, self._told(path)

    def answer(self, path: str) -> Answer | None:
        """``None``: it is none of these."""
        if path in self._open:
            looks, do = self._open[path]
            if looks <= 1:
                self._end(path, do)
            else:
                self._open[path] = (looks - 1, do)
        elif path not in self._ended:
            return None
        return 200, self._told(path)

    def _end(self, path: str, do: Callable[[], Answer]) -> None:
        del self._open[path]
        self._ended[path] = do()

    def _told(self, path: str) -> Any:
        status, body = self._ended.get(path, (0, None))
        if path.startswith("operations/"):
            told: dict[str, Any] = {"name": path, "done": bool(status)}
            if status >= 400:
                error = body["error"]
                told["error"] = {"code": _CODES[error["status"]], "message": error["message"]}
            return told
        place = f"{URL.removesuffix(f'projects/{PROJECT}')}{path}"
        told = {"kind": "compute#operation", "name": path.rpartition("/")[2], "selfLink": place}
        told["status"] = "DONE" if status else "RUNNING"
        if status >= 400:
            (error,) = body["error"]["errors"]
            code = _REASONS.get(error["reason"], "INTERNAL_ERROR")
            told["error"] = {"errors": [{"code": code, "message": error["message"]}]}
        return told
