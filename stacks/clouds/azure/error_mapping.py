"""The meaning of Azure's refusals, each in a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import CredentialsRefused, Denied
from gpuctl.stacks.clouds.extras import needs

LOG_IN = "log in (az login), or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"
CHOOSE = "az account set --subscription NAME, or set AZURE_SUBSCRIPTION_ID"
_NO_SUBSCRIPTION = ("SubscriptionNotFound", "InvalidSubscriptionId")
_UNREGISTERED = ("MissingSubscriptionRegistration", "SubscriptionNotRegistered")
_ACTION = re.compile(r"perform action '([^']+)'")
_IN_USE = re.compile(r"InUse|CannotBeDeleted|HasAssignments|AnotherOperation|InProgress|Retryable|Conflict")
"""In the codes of refusals that end with what they wait for, whatever their status: NicInUse, RetryableError,
InUseSubnetCannotBeDeleted, PublicIPAddressCannotBeDeleted, RoleDefinitionHasAssignments and more."""
_LOCKED = "ScopeLocked"
"""By a person: a 409 that does not go away."""
_ENTRA = re.compile(r"AADSTS\d+")
"""What Microsoft's log-in service calls its refusals."""


class NotFound(GpuctlError):
    """The resource does not exist."""


class RetryLater(GpuctlError):
    """The request may succeed later: something is still in use, or changes at this moment, or Azure is too busy."""


class Unregistered(GpuctlError):
    """The subscription has never used this part of Azure, so nothing of it is there."""


@contextmanager
def understood() -> Iterator[None]:
    """Turn what Azure's packages raise within into a ``GpuctlError``."""
    try:
        from azure.core.exceptions import AzureError, ClientAuthenticationError, DecodeError, HttpResponseError
    except ModuleNotFoundError as error:
        raise needs("azure", error) from error
    try:
        yield
    except DecodeError as error:
        raise GpuctlError("the response is not from Azure's API", "is there a proxy in between?") from error
    except HttpResponseError as error:
        if isinstance(error, ClientAuthenticationError) and error.response is None:
            raise _no_token(error) from error
        raise _refusal(error) from error
    except AzureError as error:
        said = " ".join(str(error).split())
        raise RetryLater(f"Azure does not respond: {said[:200]}", "check the network") from error
    except json.JSONDecodeError as error:  # which azure.core does not count among its own
        raise GpuctlError("the response is not from Azure's API", "is there a proxy in between?") from error


def refused(code: str, said: str, *, is_conflict: bool = False) -> GpuctlError:
    """``RetryLater`` for what is in use, or where the answer was a conflict."""
    waits = code != _LOCKED and (is_conflict or _IN_USE.search(code))
    return (RetryLater if waits else GpuctlError)(f"Azure refused: {code}: {' '.join(said.split())[:200]}")


def _no_token(error: Any) -> CredentialsRefused:
    """The error for ``azure-identity``'s failure, which tells what each of a dozen ways has said."""
    said = " ".join(str(error).split())
    code = _ENTRA.search(said)
    if "expired" in said.lower():
        return CredentialsRefused("the Azure login has expired", LOG_IN)
    if code:
        return CredentialsRefused(f"Azure rejects these credentials ({code.group()})", LOG_IN)
    return CredentialsRefused("no Azure credentials found", LOG_IN)


def _refusal(error: Any) -> GpuctlError:
    """The error for an answer with an error in it."""
    status = error.status_code
    code, said = _told(error.response)
    if code in _NO_SUBSCRIPTION:
        return GpuctlError("these Azure credentials see no such subscription", f"see az account list; {CHOOSE}")
    if code in _UNREGISTERED:
        return Unregistered(f"the subscription has never used this: {said}"[:200], "az provider register")
    if status == 401:
        if code == "ExpiredAuthenticationToken" or "expired" in said.lower():
            return CredentialsRefused("the Azure login has expired", LOG_IN)
        return CredentialsRefused(f"Azure rejects these credentials here ({code or status})", LOG_IN)
    if status == 403:
        action = _ACTION.search(said)
        what = f"call {action.group(1)}" if action else f"do this ({code})"
        return Denied(f"these Azure credentials may not {what}", "ask the subscription's administrator")
    if status == 404:
        return NotFound(f"Azure no longer has it: {said or code}"[:200])
    if status is None or status >= 500 or status == 429:
        return RetryLater(f"Azure answered {status}", "try again later")
    return refused(code, said, is_conflict=status == 409)


def _told(response: Any) -> tuple[str, str]:
    """Code and message; both empty if it is a page for people."""
    try:
        error = json.loads(response.text())["error"]
        return str(error["code"]), " ".join(str(error.get("message", "")).split())
    except (AttributeError, KeyError, TypeError, ValueError):
        return "", ""
