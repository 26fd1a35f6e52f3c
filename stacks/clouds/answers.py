"""The answers of clouds, in one form for all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Literal

import msgspec

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.extras import NotInstalled

_TOLD_KINDS = 3


class GroupSize(msgspec.Struct, frozen=True, kw_only=True):
    """The number of machines that a cluster's group holds."""

    desired: int
    """The number that the group works towards: what ``up`` set, less the idle nodes that have left."""
    running: int
    names: tuple[str, ...] = ()
    """Of all machines that there are, in the cloud's words, those that only start or end among them."""


class LaunchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A reason why a machine did not start, and what that means for those who wait."""

    message: str
    """In the cloud's words, in one line."""
    verdict: Literal["wait", "next zone", "stop"] = "wait"
    """``wait``: the cloud goes on trying, as with a lack of capacity. ``next zone``: never in this zone, such as a type
    that is not sold there. ``stop``: in no zone, such as a quota, an image that is not there, a key that may not be
    used."""
    at: str = ""
    """When, by the cloud's clock, in any form: it tells a problem of now from the same one of an earlier try."""


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """A resource in the cloud with gpuctl's tags."""

    cluster: str
    kind: str
    """In the cloud's words, such as ``NAT gateway``."""
    id: str
    region: str
    """Empty: it is in no region."""
    about: str = ""
    usd_per_hour: float | None = 0.0
    """While it is only there; ``None``: it costs something, and nobody has told us what."""
    cluster_id: str = ""
    """Identity of its cluster (see ``StackRequest.id``); empty where the thing does not tell."""
    owner: str = ""
    """Who made it, as its tag says."""
    created: str = ""
    """Day, as its tag says, YYYY-MM-DD."""
    ref: str = ""
    """What ``removal`` deletes it by where ``id`` is not enough: a full resource id, or the zone and the name."""


class KeptBucket(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket that gpuctl made, and that ``down`` leaves."""

    cluster: str
    url: str
    """As ``gpuctl.cluster.storage.bucket.open_bucket`` takes it, down to the cluster's own prefix."""
    name: str
    """Of the bucket; on Azure of the storage account."""
    region: str
    cluster_id: str = ""
    owner: str = ""
    created: str = ""
    group: str = ""
    """Azure: the resource group that holds the account."""
    missing: bool = False
    """Azure: there is that group, and no account or no container in it: an ``up`` was interrupted."""


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """Resources found, by cluster, the most expensive first, and what could not be looked at: a scan that was refused
    something proves nothing."""

    regions: tuple[str, ...]
    found: tuple[Leftover, ...]
    unseen: tuple[str, ...] = ()

    @property
    def usd_per_hour(self) -> float:
        """US dollars per hour of all whose price is known."""
        return sum(one.usd_per_hour or 0.0 for one in self.found)

    def summary(self) -> str:
        """Such as ``2 instances, 1 NAT gateway and 9 more, $1.62/h``; empty: nothing was found."""
        if not self.found:
            return ""
        dearest = sorted(self.found, key=lambda one: -math.inf if one.usd_per_hour is None else -one.usd_per_hour)
        many = Counter(one.kind for one in dearest)
        told = [f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in list(many.items())[:_TOLD_KINDS]]
        rest = sum(many.values()) - sum(list(many.values())[:_TOLD_KINDS])
        more = f" and {rest} more" if rest else ""
        unpriced = sum(one.usd_per_hour is None for one in self.found)
        and_more = f" and {unpriced} without a known price" if unpriced else ""
        return f"{', '.join(told)}{more}, ${self.usd_per_hour:.2f}/h{and_more}"


class CredentialsRefused(GpuctlError):
    """Credentials are missing, or the cloud refuses them."""


class NoGroup(GpuctlError):
    """The group of a cluster's machines does not exist, as the cloud says; no answer is another thing."""


class Denied(GpuctlError):
    """The credentials are valid but lack a permission."""


class PreflightCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check that only the cloud could answer before anything is created."""

    name: str
    status: Literal["ok", "fail", "unknown"]
    """``unknown``: it may not be asked."""
    message: str
    page: str = ""
    """Where to fix it."""

    @classmethod
    def ok(cls, name: str, message: str) -> PreflightCheck:
        return cls(name=name, status="ok", message=message)

    @classmethod
    def fail(cls, name: str, message: str, page: str = "") -> PreflightCheck:
        return cls(name=name, status="fail", message=message, page=page)

    @classmethod
    def of(cls, name: str, ask: Callable[[], PreflightCheck]) -> PreflightCheck:
        """The check that ``ask`` returns; a cloud that refuses to answer is no failure."""
        try:
            return ask()
        except Denied as error:
            return cls(name=name, status="unknown", message=str(error))
        except NotInstalled:
            raise
        except GpuctlError as error:
            return cls.fail(name, str(error))


Severity = Literal["error", "warning", "note"]


class PlanFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A rule's finding about a request (see ``validators``)."""

    rule: str
    severity: Severity
    message: str
    hint: str = ""
