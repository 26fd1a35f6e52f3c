"""The meaning of Google's refusals, in a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import CredentialsRefused, Denied
from gpuctl.stacks.clouds.extras import needs

CONSOLE = "https://console.cloud.google.com"
_LOG_IN = "log in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS"
_NO_PROJECT = ("CONSUMER_INVALID", "RESOURCE_PROJECT_INVALID", "USER_PROJECT_DENIED")
_NOT_ENABLED = ("SERVICE_DISABLED", "accessNotConfigured")
_TOO_MANY = ("rateLimitExceeded", "userRateLimitExceeded")
_IN_USE = ("resourceInUseByAnotherResource", "resourceNotReady")
_CONFLICTS = {400: "FAILED_PRECONDITION", 409: "ABORTED"}
"""Status of Google's newer services (google.rpc.Code) by HTTP status: something stands in the way, or has changed at
the same time. Cloud Storage says the latter by 412."""


class NotFound(GpuctlError):
    """The resource does not exist."""


class Disabled(Denied):
    """The project has never enabled this service."""


class Unreachable(GpuctlError):
    """A part of the answer is missing; the rest was delivered."""


class InUse(GpuctlError):
    """Something temporary stands in the way: another thing that uses it, another change. Worth a new try."""


@contextmanager
def understood() -> Iterator[None]:
    """Turn what Google's clients raise within into a ``GpuctlError``."""
    auth, api = google("google.auth.exceptions"), google("google.api_core.exceptions")
    requests = google("requests.exceptions")
    try:
        yield
    except api.GoogleAPICallError as error:
        raise _refusal(error) from error
    except auth.DefaultCredentialsError as error:
        raise _no_credentials(error) from error
    except auth.RefreshError as error:
        raise _not_taken(error) from error
    except (auth.TransportError, api.RetryError, requests.RequestException) as error:
        said = line(str(error))
        raise GpuctlError(f"Google Cloud does not respond: {said}", "check the network") from error
    except auth.GoogleAuthError as error:
        raise CredentialsRefused(f"the Google Cloud credentials cannot be used: {line(str(error))}", _LOG_IN) from error


def _refusal(error: Any) -> GpuctlError:
    """The error for a ``GoogleAPICallError``: Google has answered."""
    # "GET https://…/instances: Required 'compute.instances.list' permission for …"
    said = line(str(error.message).partition(": ")[2] or str(error.message))
    reasons = {str(one.get("reason")) for one in _told(error)} | {str(error.reason)}
    if error.code == 401:
        return CredentialsRefused("Google Cloud rejects these credentials, or they have expired", _LOG_IN)
    if error.code is None or error.code >= 500 or error.code == 429 or reasons & {*_TOO_MANY}:
        return GpuctlError(f"Google Cloud answered {error.code}: {said}", "try again later")
    if reasons & {*_NOT_ENABLED}:
        return Disabled(said, f"enable it at {_enabling(error)}")
    if reasons & {*_NO_PROJECT} or (error.code == 404 and _is_about_project(said)):
        return NotFound(
            f"there is no such Google Cloud project, or it is not yours: {said}", "set GOOGLE_CLOUD_PROJECT"
        )
    if error.code == 403:
        return Denied(f"these Google Cloud credentials may not do this: {said}", "ask the project's administrator")
    if error.code == 404:
        return NotFound(said)
    if reasons & {*_IN_USE} or _CONFLICTS.get(error.code) == _status(error) or error.code == 412:
        return InUse(f"Google Cloud refused: {said}", "repeat it")
    return GpuctlError(f"Google Cloud refused: {said}")


def _told(error: Any) -> list[Mapping[str, Any]]:
    return [one for one in error.errors or () if isinstance(one, Mapping)]


def _status(error: Any) -> str:
    """Such as ``FAILED_PRECONDITION``; Compute Engine has none."""
    try:
        told = error.response.json()["error"]
        return str(told.get("status", ""))
    except (AttributeError, ValueError, TypeError, KeyError):
        return ""


def _is_about_project(said: str) -> bool:
    """ "The resource 'projects/nope' was not found", and no resource in a project."""
    named = said.partition("'projects/")[2].partition("'")[0]
    return bool(named) and "/" not in named


def _enabling(error: Any) -> str:
    service = (error.metadata or {}).get("service", "compute.googleapis.com")
    return f"{CONSOLE}/apis/library/{service}"


def _no_credentials(error: Any) -> CredentialsRefused:
    said = line(str(error))
    if "credentials were not found" in said:
        return CredentialsRefused("no Google Cloud credentials found", _LOG_IN)
    return CredentialsRefused(f"the Google Cloud credentials cannot be read: {said}", _LOG_IN)


def _not_taken(error: Any) -> CredentialsRefused:
    said = line(str(error.args[0] if error.args else error))
    if ("invalid_grant" in said and "JWT" not in said) or "reauth" in said.lower():
        return CredentialsRefused("the Google Cloud credentials have expired, or were revoked", _LOG_IN)
    return CredentialsRefused(f"Google rejects these credentials: {said}", _LOG_IN)


def line(said: str) -> str:
    """A message on one line, not too long."""
    return " ".join(said.split())[:200]


def google(module: str) -> Any:
    """It weighs more than a second, which verbs that ask no cloud should not take; and a type checker that read all of
    Compute Engine's classes would take minutes."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise needs("gcp", error) from error
