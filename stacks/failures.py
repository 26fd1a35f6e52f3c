"""Why a stack could not be changed, told from what Pulumi wrote: a word for programs, a line for people.

Only texts are read here, Pulumi itself is not needed. They are those of ``pkg/backend/diy/lock.go`` (who holds the
lock), ``pkg/cmd/pulumi`` (cancelled) and of the bridge that most providers are built with.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import psutil

from gpuctl.cluster.errors import GpuctlError


class Failure(StrEnum):
    """What to do next depends on it."""

    RESOURCE = "resource"
    """A cloud refused something. The state knows what is there: the next ``up`` goes on from it."""
    LEFT = "left"
    """All that is wanted is there. What it has replaced is still in use, and could not be taken away yet."""
    CANCELLED = "cancelled"
    BUSY = "busy"
    """Another update goes on, on this machine: nothing clears its lock while it lives."""
    HELD = "held"
    """Another update goes on elsewhere, or did when it crashed: only a person can know."""
    CRASHED = "crashed"
    """An update ended without a word, and left its lock or operations whose outcome nobody knows."""
    NO_STACK = "no stack"
    NO_CLI = "no cli"
    OLD_CLI = "old cli"
    NO_PLUGIN = "no plugin"
    OTHER = "other"


CLEARABLE = (Failure.HELD, Failure.CRASHED)
"""What ``force`` clears away."""


class StackFailed(GpuctlError):
    def __init__(self, kind: Failure, message: str, hint: str = "", left: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.kind = kind
        self.left = tuple(left)
        """What is there now, as ``aws:ec2/vpc:Vpc demo``; empty where nobody looked."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One resource that failed."""

    type: str
    name: str
    operation: str
    """``create``, ``update``, …; empty: nothing was begun."""
    said: str
    """By its provider, all of it."""

    def __str__(self) -> str:
        did = f" ({self.operation})" if self.operation else ""
        return f"{self.type} {self.name}{did} failed: {first_line(self.said)}"


@dataclass(frozen=True, slots=True)
class Holder:
    """Of a lock in a backend without a server."""

    user: str
    host: str
    pid: int
    since: str
    """RFC 3339."""

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()

    @property
    def lives(self) -> bool:
        """Only for one that is here. A process that began after the lock was made has inherited the number."""
        try:
            return psutil.Process(self.pid).create_time() <= datetime.fromisoformat(self.since).timestamp() + 1.0
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (pid {self.pid}) since {self.since}"


_COLOUR = re.compile(r"<\{%.*?%\}>")
_HOLDER = re.compile(r"created by (\S+)@(\S+) \(pid (\d+)\) at (\S+)")
_INSTALL = re.compile(r"install the plugin using `?(pulumi plugin install [\w .:/@-]+)")
_CANCELLED = re.compile(r"\b(update|preview|refresh|destroy) cancell?ed\b")
_SAYS_NOTHING = re.compile(r"(\d+ errors? occurred:|error:|update failed|preview failed)?")
_BEFORE = re.compile(r"^(error: |\* |sdk[\w./-]*:\d+: [\w.]+: )+")
_AFTER = re.compile(r":? provider=\w+@\S+$")
_AGAIN = "wait until it has ended"
_FORCE = "if it has crashed, repeat with --force"


def first_line(said: str) -> str:
    """Of an error, the first line that says something: no colours, no counts, no place in the provider's source."""
    for line in _COLOUR.sub("", said).splitlines():
        bare = _AFTER.sub("", _BEFORE.sub("", line.strip())).strip()
        if not _SAYS_NOTHING.fullmatch(bare):
            return bare
    return "it did not say why"


def failure(cluster: str, written: str, refusals: Sequence[Refusal], left: Sequence[str] = ()) -> StackFailed:
    """``written`` is what the CLI wrote, ``refusals`` what its events told, ``left`` what is there now."""
    if found := _lock(cluster, written) or _plugin(written, refusals):
        return found
    next_step = _next_step(left)
    if _CANCELLED.search(written):
        return StackFailed(Failure.CANCELLED, f"the change of {cluster} was cancelled half-way", next_step, left)
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        kind = Failure.LEFT if all(one.operation == "delete-replaced" for one in refusals) else Failure.RESOURCE
        return StackFailed(kind, f"{refusals[0]}{more}", next_step, left)
    return StackFailed(Failure.OTHER, f"{cluster} could not be changed: {_last_error(written)}", next_step, left)


def interrupted(cluster: str, pending: Sequence[str]) -> StackFailed:
    """``pending``: operations whose outcome nobody knows, as ``creating aws:ec2/vpc:Vpc demo``."""
    return StackFailed(
        Failure.CRASHED,
        f"an update of {cluster} ended half-way, while {', '.join(pending)}",
        "repeat with --force to go on without it; `gpuctl down` looks for what it may have left",
    )


def place(urn: str) -> tuple[str, str]:
    """Type and name in ``urn:pulumi:<stack>::<project>::<types, the parent's first>::<name>``."""
    parts = urn.split("::", 3)
    return (parts[2].rpartition("$")[2], parts[3]) if len(parts) == 4 else ("", urn)


def _lock(cluster: str, written: str) -> StackFailed | None:
    holders = [Holder(user, host, int(pid), since) for user, host, pid, since in _HOLDER.findall(written)]
    if holders and "locked by" in written:
        who = ", ".join(str(holder) for holder in holders)
        if any(holder.is_here and holder.lives for holder in holders):
            return StackFailed(Failure.BUSY, f"{cluster} is being changed by {who}", _AGAIN)
        if all(holder.is_here for holder in holders):
            return StackFailed(
                Failure.CRASHED, f"{cluster} is locked by {who}, which has ended", "repeat with --force to clear that"
            )
        return StackFailed(Failure.HELD, f"{cluster} is locked by {who}", f"{_AGAIN}; {_FORCE}")
    if "[409] Conflict" in written or "locked by" in written:
        return StackFailed(Failure.HELD, f"{cluster} is being changed by somebody else", f"{_AGAIN}; {_FORCE}")
    return None


def _plugin(written: str, refusals: Sequence[Refusal]) -> StackFailed | None:
    for text in (written, *(refusal.said for refusal in refusals)):
        if found := _INSTALL.search(_COLOUR.sub("", text)):
            command = found[1].strip()
            name = command.removeprefix("pulumi plugin install ").removeprefix("resource ")
            return StackFailed(Failure.NO_PLUGIN, f"Pulumi's plug-in {name} is not installed", f"run: {command}")
    return None


def _next_step(left: Sequence[str]) -> str:
    if not left:
        return "repeat it, or `gpuctl down` to make sure that nothing is left"
    things = "resource is" if len(left) == 1 else "resources are"
    return f"{len(left)} {things} there: repeat it to go on from them, or `gpuctl down` to remove them"


def _last_error(written: str) -> str:
    """The line of the CLI's own, which it writes last."""
    errors = [line for line in written.splitlines() if line.strip().startswith("error:")]
    return first_line("\n".join(reversed(errors)) or written)
