"""What a test puts in the way of the resource plug-ins, and what it learns of them, through a folder that both know.

An operation is named as ``create aws:ec2/vpc:Vpc demo``: the verb (``create``, ``update``, ``delete``), the Pulumi
token, the resource's name.

::

    <folder>/operations        all that was begun and what came of it, a line each: "begun|done|failed <operation>",
                               "cancelled"
    <folder>/<operation>.*     what is in its way

The plug-in is a process of its own: what it was at when its engine died goes on, and comes to be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from tests.waiting import PATIENCE_S

FOLDER = "GPUCTL_TEST_OBSTACLES"
"""In the environment of the plug-ins."""
_Made = TypeVar("_Made")


class Obstacles:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    # -- what a test does ----------------------------------------------------------------------------------------------

    def refuse(self, operation: str, why: str = "UnauthorizedOperation: You are not authorized") -> None:
        """From now on the cloud says no to it."""
        self._path(operation, "refuse").write_text(why)

    def hold(self, operation: str, *, once_made: bool = False) -> None:
        """The plug-in will stop there, before it asks the cloud, or (``once_made``) once the cloud has done it and
        before the engine hears of it."""
        self._path(operation, "hold").write_text("after" if once_made else "before")

    def release(self, operation: str) -> None:
        """No longer in the way, and whatever is held there goes on."""
        for kind in ("hold", "refuse"):
            self._path(operation, kind).unlink(missing_ok=True)

    def wait_until_held(self, operation: str) -> None:
        """Raises ``TimeoutError``."""
        self._wait(self._path(operation, "held").exists, f"nothing has come to {operation!r}")

    def wait_until_ended(self, operation: str) -> None:
        """The cloud has done it, or has said no; whether or not anybody was left to hear that."""
        self._wait(
            lambda: bool({f"done {operation}", f"failed {operation}"} & {*self._lines()}), f"{operation} goes on"
        )

    def wait_until_cancelled(self) -> None:
        """The engine has told the plug-in that nothing more is wanted: the first Ctrl-C has come through."""
        self._wait(lambda: "cancelled" in self._lines(), "nobody has cancelled anything")

    def done(self, verb: str = "create") -> list[str]:
        """All operations of this verb that the cloud has done, in the order in which they were begun."""
        lines = self._lines()
        begun = [line.removeprefix("begun ") for line in lines if line.startswith(f"begun {verb} ")]
        return [operation for operation in dict.fromkeys(begun) if f"done {operation}" in lines]

    def forget(self) -> None:
        """Nothing has happened, and nothing is in the way."""
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)

    # -- what the plug-in does -----------------------------------------------------------------------------------------

    def meet(self, operation: str, act: Callable[[], _Made]) -> _Made:
        """``act``, with all that is in its way."""
        self._tell(f"begun {operation}")
        try:
            self._stop(operation, "before")
            self._refuse(operation)
            made = act()
        except Exception:
            self._tell(f"failed {operation}")
            raise
        self._tell(f"done {operation}")
        self._stop(operation, "after")
        return made

    def cancel(self) -> None:
        self._tell("cancelled")

    def _refuse(self, operation: str) -> None:
        refusal = self._path(operation, "refuse")
        if refusal.exists():
            raise PermissionError(refusal.read_text())

    def _stop(self, operation: str, where: str) -> None:
        hold, held = self._path(operation, "hold"), self._path(operation, "held")
        if not hold.exists() or hold.read_text() != where:
            return
        held.touch()
        try:
            self._wait(lambda: not hold.exists(), f"nobody has released {operation!r}")
        finally:
            held.unlink(missing_ok=True)

    def _tell(self, line: str) -> None:
        with (self._folder / "operations").open("a") as file:
            file.write(f"{line}\n")

    def _lines(self) -> list[str]:
        path = self._folder / "operations"
        return path.read_text().splitlines() if path.exists() else []

    def _path(self, operation: str, kind: str) -> Path:
        return self._folder / f"{quote(operation, safe='')}.{kind}"

    @staticmethod
    def _wait(condition: Callable[[], bool], otherwise: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(otherwise)
            time.sleep(0.02)


def of_environment() -> Obstacles | None:
    folder = os.environ.get(FOLDER)
    return Obstacles(Path(folder)) if folder else None
