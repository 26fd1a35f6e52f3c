"""Deletes what ``leaks`` found, in the order that AWS asks for, whatever Pulumi's state knows of it.

Nothing but what it is given is touched, and what is a part of that without tags of its own: rules, associations,
policies. What is in use goes once its user has gone, so everything is tried again for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import CredentialsRefused, Leftover
from gpuctl.stacks.clouds.aws.cleanup.deletions import STAGES, DeletionRule, InUse
from gpuctl.stacks.clouds.aws.client import Connect, connecting, understood
from gpuctl.stacks.clouds.aws.partition import home
from gpuctl.stacks.clouds.aws.usual_region import usual_region

_PATIENCE_S = 900.0
"""For each region. A machine with eight GPUs takes minutes to end; a NAT gateway two or three."""
_LOOK_S = 5.0
_GONE = ("Gateway.NotAttached", "InvalidPlacementGroup.Unknown", "NatGatewayNotFound", "NoSuchEntity")
"""Besides those that end with ``NotFound`` (docs.aws.amazon.com/AWSEC2, "Error codes for the Amazon EC2 API")."""
_BUSY = (
    "DeleteConflict",
    "DependencyViolation",
    "IncorrectState",
    "RequestLimitExceeded",
    "ResourceInUse",
    "ScalingActivityInProgress",
    "VolumeInUse",
)
"""Besides those that end with ``.InUse``: something is in use, or still changes."""


def remove(
    leftovers: Sequence[Leftover],
    say: Callable[[str], None],
    connect: Connect | None = None,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Delete what a scan has found; see ``Cloud.remove``.

    Args:
        leftovers: of any regions; what is in none, such as a role, is deleted last.
        say: is told what was deleted, what is waited for, and what is still there with AWS's reason.
        connect: makes the clients of boto3; ``None``: with the credentials of the environment.
        pause: sleeps for so many seconds between two looks.
        now: a clock in seconds, by which each region has its deadline.

    Raises ``CredentialsRefused``, and ``BadInput`` without boto3.
    """
    if not leftovers:
        return
    connect = connect or connecting()
    regions = sorted({one.region for one in leftovers if one.region})
    for region in [*regions, ""]:  # roles last: machines use them
        at = region or home((regions or [usual_region()[0]])[0])
        until = now() + _PATIENCE_S
        here = [one for one in leftovers if one.region == region]
        for stage in STAGES:
            going = [_Going(step, one, connect(step.service, at)) for step in stage for one in here if step.is_for(one)]
            _remove(going, say, lambda: now() < until, pause)  # noqa: B023
        for one in here:
            if not any(step.is_for(one) for stage in STAGES for step in stage):
                say(f"{_named(one)}: gpuctl does not know how to delete it")


def _remove(
    going: list[_Going], say: Callable[[str], None], is_time_left: Callable[[], bool], pause: Callable[[float], None]
) -> None:
    """All at once; returns when they have gone, or when no time is left."""
    told = False
    while True:
        for one in going:
            if one.goes():
                say(one.outcome)
        going = [one for one in going if not one.is_done]
        if not going:
            return
        if not is_time_left():
            break
        if not told:
            say(f"waiting for {', '.join(_named(one.thing) for one in going)}")
        told = True
        pause(_LOOK_S)
    for one in going:
        say(f"{_named(one.thing)} is still there: {one.outcome}")


class _Going:
    """One thing on its way out."""

    def __init__(self, step: DeletionRule, thing: Leftover, client: Any) -> None:
        self.thing = thing
        self.is_done = False
        """It has gone, or AWS refuses for good."""
        self.outcome = ""
        """In words; while it is not done, why."""
        self._step = step
        self._client = client
        self._is_agreed = False

    def goes(self) -> bool:
        """One step further; whether that was the last one."""
        try:
            if not self._is_agreed:
                _unless_gone(lambda: self._step.delete(self._client, self.thing.id))
                self._is_agreed = True
            if _unless_gone(lambda: self._step.is_there(self._client, self.thing.id)):
                self.outcome = "AWS accepted the deletion but has not completed it yet"
                return False
            self.outcome = f"deleted {_named(self.thing)}"
        except CredentialsRefused:
            raise
        except GpuctlError as refused:
            self.outcome = refused.message
            if _is_busy(refused):
                return False
            self.outcome = f"{_named(self.thing)} is still there: {refused.message}"
        self.is_done = True
        return True


def _named(one: Leftover) -> str:
    return f"{one.kind} {one.id}" + (f" in {one.region}" if one.region else "")


def _unless_gone(ask: Callable[[], object]) -> object:
    """The answer to ``ask``; ``None`` if AWS says that there is no such thing."""
    from botocore.exceptions import ClientError

    with understood():
        try:
            return ask()
        except ClientError as error:
            if _is_gone(_code(error), error.response["Error"].get("Message", "")):
                return None
            raise


def _is_gone(code: str, message: str) -> bool:
    # Auto Scaling has one code for all that is wrong: "AutoScalingGroup name not found - …".
    no_group = code == "ValidationError" and "AutoScalingGroup name not found" in message
    return no_group or code in _GONE or code.removesuffix("Exception").endswith("NotFound")


def _is_busy(refused: GpuctlError) -> bool:
    code = _code(refused.__cause__)
    if code == "InvalidParameterValue":  # "Network interface 'eni-…' is currently in use"
        return "in use" in refused.message
    return isinstance(refused, InUse) or code.endswith(".InUse") or code in _BUSY


def _code(error: Any) -> str:
    """The code of a botocore ``ClientError``; empty for anything else."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
