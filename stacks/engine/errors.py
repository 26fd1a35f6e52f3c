"""The reasons why a stack could not be changed, told from what Pulumi wrote: a word for programs, a line for people.

Only texts are read here, Pulumi itself is not needed. They are those of ``pkg/backend/diy/lock.go`` (who holds the
lock), ``pkg/cmd/pulumi`` (cancelled) and of the bridge that most providers are built with.
"""

from __future__ import annotations

import os
import platform
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import psutil

from gpuctl.cluster.errors import INTERRUPTED, GpuctlError
from gpuctl.stacks.state.clusters import command


class FailureKind(StrEnum):
    """The kind of a failure, on which depends what to do next."""

    RESOURCE = "resource"
    """A cloud refused something. The state knows what is there: the next ``up`` goes on from it."""
    LEFT = "left"
    """All that is wanted is there. What it has replaced is still in use, and could not be removed yet."""
    CANCELLED = "cancelled"
    BUSY = "busy"
    """Another update goes on, on this machine: nothing clears its lock while it lives."""
    HELD = "held"
    """Another update goes on elsewhere, or did when it crashed: only a person can know."""
    STALE = "stale lock"
    """A process of this very machine that has ended has left its lock: it is cleared without asking."""
    UNREADABLE = "unreadable"
    """There is a state, and it cannot be opened: another passphrase, a file that is damaged."""
    NO_STACK = "no stack"
    NO_CLI = "no cli"
    OLD_CLI = "old cli"
    NO_PLUGIN = "no plugin"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ResourceFailure:
    """The failure of one resource in an operation."""

    type: str
    name: str
    operation: str
    """``create``, ``update``, …; empty: nothing was begun."""
    said: str
    """By its provider, all of it."""

    def __str__(self) -> str:
        did = f" ({self.operation})" if self.operation else ""
        return f"{self.type} {self.name}{did} failed: {first_line(self.said)}"


class StackFailed(GpuctlError):
    """An operation of the engine failed.

    Args:
        kind: decides what to do next.
        message: one line for people.
        hint: what the user may do; empty: nothing.
        left: resources that are there now; empty where nobody looked.
        refusals: resources that failed, with what their provider said; empty: the failure is of none.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        hint: str = "",
        left: Sequence[str] = (),
        refusals: Sequence[ResourceFailure] = (),
    ) -> None:
        super().__init__(message, hint)
        self.kind = kind
        self.left = tuple(left)
        """What is there now, as ``aws:ec2/vpc:Vpc demo``; empty where nobody looked."""
        self.refusals = tuple(refusals)
        self.holder: LockHolder | None = None
        """Of a lock whose process was seen to live."""
        if kind is FailureKind.CANCELLED:
            self.exit_code = INTERRUPTED

    @property
    def is_forbidden(self) -> bool:
        """Whether all that failed did so for want of a right: to try again later is in vain."""
        return bool(self.refusals) and all(_FORBIDDEN.search(one.said) for one in self.refusals)


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The holder of a lock in a backend without a server."""

    user: str
    host: str
    pid: int
    since: str
    """RFC 3339."""

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()

    @property
    def is_ours(self) -> bool:
        """Whether its process would be seen here, if it lived: two machines may have one name, and share a state."""
        return self.is_here and self.user == _user()

    @property
    def lives(self) -> bool:
        """Only for one that is here. A process that began after the lock was made has inherited the number, and one
        whose parent has not asked for its end yet has ended all the same."""
        try:
            process = psutil.Process(self.pid)
            began_before = process.create_time() <= datetime.fromisoformat(self.since).timestamp() + 1.0
            return began_before and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (pid {self.pid}) since {self.since}"


_FORBIDDEN = re.compile(r"\b(AccessDenied|UnauthorizedOperation|AuthorizationFailed|PERMISSION_DENIED|forbidden)\b")
"""Codes of AWS, Azure and Google (the last also as a reason of its older interfaces)."""
_COLOUR = re.compile(r"<\{%.*?%\}>")
_HOLDER = re.compile(r"created by (\S+)@(\S+) \(pid (\d+)\) at (\S+)")
_INSTALL = re.compile(r"install the plugin using `?(pulumi plugin install [\w .:/@-]+)")
_CANCELLED = re.compile(r"\b(update|preview|refresh|destroy) cancell?ed\b")
_UNREADABLE = re.compile(
    r"incorrect passphrase|passphrase must be set|failed to decrypt|could not deserialize deployment"
    r"|unexpected end of JSON input|invalid character .* looking for|could not unmarshal|snapshot integrity failure",
    re.IGNORECASE,
)
"""``pkg/secrets/passphrase``, ``pkg/backend/diy/state.go`` and Go's own ``encoding/json``."""
_SAYS_NOTHING = re.compile(r"(\d+ errors? occurred:|error:|update failed|preview failed)?")
_BEFORE = re.compile(r"^(error: |\* |sdk[\w./-]*:\d+: [\w.]+: )+")
_AFTER = re.compile(r":? provider=\w+@\S+$")
_AGAIN = "wait until it has ended"
_FORCE = "if it has crashed, repeat with --force"


def first_line(said: str) -> str:
    """The first line of an error that says something: no colours, no counts, no place in the provider's source."""
    for line in _COLOUR.sub("", said).splitlines():
        bare = _AFTER.sub("", _BEFORE.sub("", line.strip())).strip()
        if not _SAYS_NOTHING.fullmatch(bare):
            return bare
    return "it gave no reason"


def failure(cluster: str, written: str, refusals: Sequence[ResourceFailure], left: Sequence[str] = ()) -> StackFailed:
    """The error for a command of the CLI that failed.

    Args:
        cluster: its name, for the message.
        written: what the CLI wrote, on both streams.
        refusals: what its events told.
        left: what is there now, as ``aws:ec2/vpc:Vpc demo``; empty where nobody looked.
    """
    if found := _lock(cluster, written) or _plugin(written, refusals):
        return found
    next_step = _next_step(cluster, left)
    if _CANCELLED.search(written):
        return cancelled(cluster, left)
    if not refusals and _UNREADABLE.search(written):
        return unreadable(cluster, _last_error(written))
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        kind = FailureKind.LEFT if all(one.operation == "delete-replaced" for one in refusals) else FailureKind.RESOURCE
        return StackFailed(kind, f"{refusals[0]}{more}", next_step, left, refusals)
    return StackFailed(FailureKind.OTHER, f"{cluster} could not be changed: {_last_error(written)}", next_step, left)


def cancelled(cluster: str, left: Sequence[str]) -> StackFailed:
    """The error for an operation cancelled by the user."""
    return StackFailed(
        FailureKind.CANCELLED, f"the update of {cluster} was interrupted", _next_step(cluster, left), left
    )


def unreadable(cluster: str, why: str) -> StackFailed:
    """The state of ``cluster`` is there and cannot be opened; ``why`` is the CLI's own line."""
    return StackFailed(
        FailureKind.UNREADABLE,
        f"Pulumi's state of {cluster} cannot be read: {why}",
        "if it is shared, set PULUMI_CONFIG_PASSPHRASE as it was; else"
        f" `{command('down', cluster)}` removes the cluster by its tags",
    )


def unwritable(cluster: str, error: OSError) -> StackFailed:
    """What Pulumi needs on this machine's disk cannot be used: it is full, read-only, or somebody else's."""
    what = f"{error.filename}: " if error.filename else ""
    return StackFailed(
        FailureKind.OTHER,
        f"Pulumi's files of {cluster} cannot be used: {what}{error.strerror or error}",
        "free some space, or make them writable; then repeat it",
    )


def place(urn: str) -> tuple[str, str]:
    """Type and name in ``urn:pulumi:<stack>::<project>::<types, the parent's first>::<name>``."""
    parts = urn.split("::", 3)
    return (parts[2].rpartition("$")[2], parts[3]) if len(parts) == 4 else ("", urn)


def _user() -> str:
    """This process's, as Go tells it (``os/user``)."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


def _lock(cluster: str, written: str) -> StackFailed | None:
    holders = [LockHolder(user, host, int(pid), since) for user, host, pid, since in _HOLDER.findall(written)]
    if holders and "locked by" in written:
        who = ", ".join(str(holder) for holder in holders)
        if alive := next((holder for holder in holders if holder.is_here and holder.lives), None):
            busy = StackFailed(FailureKind.BUSY, f"{cluster} is being changed by {who}", _AGAIN)
            busy.holder = alive
            return busy
        if all(holder.is_ours for holder in holders):
            return StackFailed(FailureKind.STALE, f"{cluster} is locked by {who}, which has ended", "repeat it")
        return StackFailed(FailureKind.HELD, f"{cluster} is locked by {who}", f"{_AGAIN}; {_FORCE}")
    if "[409] Conflict" in written or "locked by" in written:
        return StackFailed(FailureKind.HELD, f"{cluster} is being changed by another process", f"{_AGAIN}; {_FORCE}")
    return None


def _plugin(written: str, refusals: Sequence[ResourceFailure]) -> StackFailed | None:
    for text in (written, *(refusal.said for refusal in refusals)):
        if found := _INSTALL.search(_COLOUR.sub("", text)):
            command = found[1].strip()
            name = command.removeprefix("pulumi plugin install ").removeprefix("resource ")
            return StackFailed(FailureKind.NO_PLUGIN, f"Pulumi's plug-in {name} is not installed", f"run: {command}")
    return None


def _next_step(cluster: str, left: Sequence[str]) -> str:
    down = command("down", cluster)
    if not left:
        return f"repeat it, or `{down}` to make sure that nothing is left"
    things = "resource is" if len(left) == 1 else "resources are"
    return f"{len(left)} {things} there: repeat it to go on from them, or `{down}` to remove them"


def _last_error(written: str) -> str:
    """The line of the CLI's own, which it writes last."""
    errors = [line for line in written.splitlines() if line.strip().startswith("error:")]
    return first_line("\n".join(reversed(errors)) or written)
