"""Deletes what ``leaks`` found, without Pulumi, in the order that Google asks for.

A group is first: it would make its machines again. A network is late: it stays while anything is in it. What a tag was
on counts for a while after it is gone, so tags are last. Google answers that it has begun, and tells in an operation
how it ended; what is still in use is tried again until a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.clouds.gcp.cleanup.leak_kinds import KINDS
from gpuctl.stacks.clouds.gcp.cleanup.policies import unbind
from gpuctl.stacks.clouds.gcp.client import Answer, GcpAccount, entering
from gpuctl.stacks.clouds.gcp.error_mapping import InUse, NotFound, line

T = TypeVar("T")

_ORDER = (
    ("instance group",),
    ("instance",),
    ("instance template", "disk", "forwarding rule"),
    ("address", "placement policy", "router", "firewall rule"),
    ("subnet",),
    ("network",),
    ("role binding", "bucket binding"),
    ("service account",),
    ("role",),
    ("tag value",),
    ("tag key",),
)
"""Each after what may stand in its way."""
_BINDINGS = ("role binding", "bucket binding")
_SERVICES = {
    **{kind.what: ("compute", "compute/v1") for kind in KINDS},
    **dict.fromkeys(("service account", "role"), ("iam", "v1")),
    **dict.fromkeys(("tag key", "tag value"), ("cloudresourcemanager", "v3")),
}
_IN_USE_S = 600.0
"""Patience with one step of ``_ORDER``. A binding of a tag to something deleted was seen to last minutes."""
_OPERATION_S = 1200.0
"""A group's machines may take their time to shut down."""
_LOOK_S = 2.0
_AGAIN_S = 10.0
_BUSY = ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "RESOURCE_NOT_READY", "RESOURCE_IN_USE")
_NOT_FOUND, _FAILED_PRECONDITION, _ABORTED = 5, 9, 10
"""google.rpc.Code, in operations of Resource Manager."""


class _Begun(NamedTuple):
    service: str
    path: str
    """Of the operation, to ask how it goes; empty: it has ended."""


def remove(
    leftovers: Sequence[Leftover],
    say: Callable[[str], None],
    account: GcpAccount | None = None,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Delete what a scan has found; see ``Cloud.remove``.

    Args:
        leftovers: of any zones; they are deleted in the order that Google asks for.
        say: is told what was deleted, and what cannot be and why.
        account: the project to delete in; ``None``: that of the environment.
        pause: sleeps for so many seconds between two looks or tries.
        now: a clock in seconds, for the deadlines.

    Raises ``GpuctlError`` only where Google cannot be asked at all.
    """
    account = (account or entering()).log_in()
    removal = _Removal(account, say, pause, now)
    for kinds in _ORDER:
        removal.step([one for one in leftovers if one.kind in kinds])


class _Removal:
    def __init__(
        self, account: GcpAccount, say: Callable[[str], None], pause: Callable[[float], None], now: Callable[[], float]
    ) -> None:
        self._account = account
        self._say = say
        self._pause = pause
        self._now = now
        self._patience_s = _IN_USE_S

    def step(self, things: Sequence[Leftover]) -> None:
        """All at once, and again those that are in use."""
        until = self._now() + self._patience_s
        while things:
            things, why = self._round(things)
            if not things:
                return
            if self._now() >= until:
                for one in things:
                    self._refused(one, why[one])
                return
            self._pause(_AGAIN_S)

    def _round(self, things: Sequence[Leftover]) -> tuple[list[Leftover], dict[Leftover, GpuctlError]]:
        """Try once to delete each; returns what is still in use, and by what."""
        busy: dict[Leftover, GpuctlError] = {}
        begun = [(one, self._tried(one, busy, partial(self._begin, one))) for one in things]
        for one, operation in begun:
            if operation is not None and self._tried(one, busy, partial(self._wait, operation)):
                self._say(f"deleted {one.kind} {one.id}")
        return list(busy), busy

    def _tried(self, one: Leftover, busy: dict[Leftover, GpuctlError], do: Callable[[], T]) -> T | None:
        """``None`` for what is gone already, in use, or refused."""
        try:
            return do()
        except NotFound:
            return None
        except InUse as error:
            busy[one] = error
        except GpuctlError as error:
            self._refused(one, error)
        return None

    def _refused(self, one: Leftover, error: GpuctlError) -> None:
        """Tell of a refusal, and wait no more: what stays holds what it stands in."""
        self._patience_s = 0.0
        self._say(f"{one.kind} {one.id} cannot be deleted: {error.message}")

    def _begin(self, one: Leftover) -> _Begun:
        if one.kind in _BINDINGS:
            unbind(self._account, one)
            return _Begun("", "")
        service, version = _SERVICES[one.kind]
        try:
            answer = self._account.ask(service, f"{version}/{one.ref}", method="DELETE")
        except InUse:
            if one.kind == "role" and self._account.ask(service, f"{version}/{one.ref}").get("deleted"):
                raise NotFound(f"{one.id} is deleted") from None  # Google remembers it for a while
            raise
        return _Begun(service, _operation(service, version, answer))

    def _wait(self, begun: _Begun) -> bool:
        """Wait until the operation has ended well. Raises what else it ended with."""
        until = self._now() + _OPERATION_S
        while begun.path:
            answer = self._account.ask(begun.service, begun.path)
            if answer.get("done") or answer.get("status") == "DONE":
                _raise_of(answer)
                break
            if self._now() >= until:
                raise GpuctlError("Google Cloud is still deleting it; check again later")
            self._pause(_LOOK_S)
        return True


def _operation(service: str, version: str, answer: Answer) -> str:
    """Compute Engine's are in a place, which their own URL tells; IAM ends what it does before it answers."""
    match service:
        case "compute":
            return f"{version}/{str(answer['selfLink']).partition(f'/{version}/')[2]}"
        case "cloudresourcemanager":
            return f"{version}/{answer['name']}"
    return ""


def _raise_of(answer: Answer) -> None:
    error = answer.get("error")
    if not error:
        return
    told = next(iter(error.get("errors", ())), error)
    said = line(str(told.get("message", "")))
    code = told.get("code")
    if code in ("RESOURCE_NOT_FOUND", _NOT_FOUND):
        raise NotFound(said)
    if code in (*_BUSY, _FAILED_PRECONDITION, _ABORTED):
        raise InUse(f"Google Cloud refused: {said}")
    raise GpuctlError(f"Google Cloud refused: {said}")
