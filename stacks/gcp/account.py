"""How Google Cloud is asked, with the credentials and the project of the environment as Google's own tools find them,
and what its refusals mean, in a line.

Compute Engine is asked through google-cloud-compute, over REST. What has no such client in gpuctl's dependencies (IAM,
Resource Manager, billing) is asked with the same credentials and plain requests. Other endpoints are taken from
``CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE`` and its like, as gcloud does.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.cloud import CredentialsRefused, Denied, needs

Answer = dict[str, Any]
"""One thing, as Google's JSON has it."""

CONSOLE = "https://console.cloud.google.com"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_PROJECT_FROM = ("GOOGLE_PROJECT", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
"""In the order of Pulumi's provider, so that all of gpuctl means the same project."""
_REGION_FROM = ("GOOGLE_REGION", "GCLOUD_REGION", "CLOUDSDK_COMPUTE_REGION")
_ONE_REQUEST_S = 60.0
_ALL_ATTEMPTS_S = 90.0
_PAGE = 500
"""The most that Compute Engine gives at once."""
_LOG_IN = "log in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS"
_NO_PROJECT = ("CONSUMER_INVALID", "RESOURCE_PROJECT_INVALID", "USER_PROJECT_DENIED")
_NOT_ENABLED = ("SERVICE_DISABLED", "accessNotConfigured")
_TOO_MANY = ("rateLimitExceeded", "userRateLimitExceeded")


class NotThere(GpuctlError):
    """What was asked about does not exist."""


class Disabled(Denied):
    """The project has never enabled the service that was asked."""


class Unreachable(GpuctlError):
    """A part of the answer is missing; the rest has been told."""


class Account:
    """Credentials, and the project that they are used in. Any thread may ask."""

    def __init__(self, credentials: Any, project: str, key: str = "") -> None:
        self._credentials = credentials
        self._project = project
        self._key = key
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._session = _google("google.auth.transport.requests").AuthorizedSession(credentials)

    @property
    def project(self) -> str:
        """Raises ``BadInput`` if neither a request nor the environment names one."""
        if not self._project:
            raise BadInput(
                "no Google Cloud project is named",
                "set GOOGLE_CLOUD_PROJECT (gcloud config set project does, where gcloud is installed)",
            )
        return self._project

    @property
    def who(self) -> str:
        """The service account, if it is one: nothing tells a user's name without asking for it."""
        return str(getattr(self._credentials, "service_account_email", "") or "a user")

    def log_in(self) -> Account:
        """So that credentials that are refused are told once, and in words. Raises ``CredentialsRefused``."""
        with understood():
            self._credentials.refresh(_google("google.auth.transport.requests").Request())
        return self

    def compute(self, kind: str, method: str, **asked: Any) -> Any:
        """What Compute Engine answers to a method of the client for ``kind``, such as ``Instances``. Raises
        ``GpuctlError``; ``asked`` are fields of the request, and a misspelt one is a ``ValueError``."""
        try:
            call = getattr(self._client(kind), method)
        except AttributeError as error:
            hint = "pip install --upgrade google-cloud-compute"
            raise GpuctlError(f"the google-cloud-compute that is installed knows no {kind}.{method}", hint) from error
        with understood():
            return call(request={"project": self.project, **asked}, retry=self._retry(), timeout=_ONE_REQUEST_S)

    def listed(self, kind: str, method: str = "list", **asked: Any) -> Iterator[Any]:
        """Everything of ``kind`` that a method lists, page by page."""
        pager = self.compute(kind, method, max_results=_PAGE, **asked)
        with understood():
            yield from pager

    def everywhere(self, kind: str, field: str, **asked: Any) -> Iterator[tuple[str, Any]]:
        """Everything of ``kind`` with its scope, such as ``zones/us-central1-a`` or ``global``; ``field`` is where the
        answer has it. Raises ``Unreachable`` in the end if a zone or region did not answer."""
        missing: list[str] = []
        pager = self.compute(kind, "aggregated_list", max_results=_PAGE, **asked)
        with understood():
            for page in pager.pages:
                missing += getattr(page, "unreachables", ())  # not all kinds of answers have it
                for scope, part in page.items.items():
                    if part.warning.code not in ("", "NO_RESULTS_ON_PAGE"):
                        missing.append(scope)
                    for thing in getattr(part, field):
                        yield scope, thing
        if missing:
            raise Unreachable(f"no answer from {', '.join(dict.fromkeys(map(_place, missing)))}")

    def ask(
        self, service: str, path: str, body: Answer | None = None, query: Mapping[str, str | int] | None = None
    ) -> Answer:
        """A request for JSON to ``https://<service>.googleapis.com/<path>``: a POST if there is a ``body``. Raises
        ``GpuctlError``."""
        url = f"{_endpoint(service) or f'https://{service}.googleapis.com'}/{path}"
        method = "GET" if body is None else "POST"
        with understood():
            response = self._session.request(
                method, url, params=query, json=body, headers=self._headers(), timeout=_ONE_REQUEST_S
            )
            if response.status_code >= 400:
                raise _google("google.api_core.exceptions").from_http_response(response)
        try:
            answer = response.json()
        except ValueError as error:
            raise GpuctlError("what answers is not Google's API", "is there a proxy in between?") from error
        if not isinstance(answer, dict):
            raise GpuctlError("what answers is not Google's API", "is there a proxy in between?")
        return answer

    def pages(self, service: str, path: str, **query: str | int) -> Iterator[Answer]:
        """Of a list, until there is no more."""
        page = self.ask(service, path, query=query)
        yield page
        while token := page.get("nextPageToken"):
            page = self.ask(service, path, query={**query, "pageToken": token})
            yield page

    def _headers(self) -> dict[str, str]:
        """A person's credentials are of no project, and these services want to know whose quota a request uses."""
        if self._key:
            return {"X-Goog-Api-Key": self._key}
        person = isinstance(self._credentials, _google("google.oauth2.credentials").Credentials)
        if person and self._project and not self._credentials.quota_project_id:
            return {"X-Goog-User-Project": self._project}
        return {}

    def _client(self, kind: str) -> Any:
        with self._lock:
            if kind not in self._clients:
                endpoint = _endpoint("compute")
                self._clients[kind] = getattr(_google("google.cloud.compute_v1"), f"{kind}Client")(
                    credentials=self._credentials,
                    transport="rest",
                    client_options={"api_endpoint": endpoint} if endpoint else None,
                )
            return self._clients[kind]

    def _retry(self) -> Any:
        """Of what Google says is worth it; the clients' own would go on for ten minutes."""
        retrying, errors = _google("google.api_core.retry"), _google("google.api_core.exceptions")
        passing = (errors.TooManyRequests, errors.ServiceUnavailable, errors.GatewayTimeout)
        return retrying.Retry(retrying.if_exception_type(*passing), initial=0.5, timeout=_ALL_ATTEMPTS_S)


def own(region: str) -> str:  # noqa: ARG001
    """See ``cloud.Cloud.account``: the project, which is in no region."""
    return entering().project


def entering(project: str = "") -> Account:
    """``project``, or else the one of the environment. Raises ``BadInput`` if Google's packages are not installed,
    ``CredentialsRefused`` if there are no credentials."""
    auth = _google("google.auth")
    with understood(), warnings.catch_warnings(action="ignore"):  # of log-ins by people, to those who write programs
        credentials, own = auth.default(scopes=[_SCOPE])
    return Account(credentials, project or _of_environment(_PROJECT_FROM) or own or "")


def entering_with_key(key: str) -> Account:
    """What an API key opens, such as price lists: no project, no credentials."""
    return Account(_google("google.auth.credentials").AnonymousCredentials(), "", key)


def usual_region() -> str:
    """The one that the environment names, or nothing."""
    return _of_environment(_REGION_FROM)


def last(url: str) -> str:
    """The name at the end of a resource's URL."""
    return url.rpartition("/")[2]


@contextmanager
def understood() -> Iterator[None]:
    """What Google's clients raise within becomes a ``GpuctlError``."""
    auth, api = _google("google.auth.exceptions"), _google("google.api_core.exceptions")
    requests = _google("requests.exceptions")
    try:
        yield
    except api.GoogleAPICallError as error:
        raise _refusal(error) from error
    except auth.DefaultCredentialsError as error:
        raise _no_credentials(error) from error
    except auth.RefreshError as error:
        raise _not_taken(error) from error
    except (auth.TransportError, api.RetryError, requests.RequestException) as error:
        said = _line(str(error))
        raise GpuctlError(f"Google Cloud does not answer: {said}", "is the network up?") from error
    except auth.GoogleAuthError as error:
        raise CredentialsRefused(
            f"the Google Cloud credentials cannot be used: {_line(str(error))}", _LOG_IN
        ) from error


def _refusal(error: Any) -> GpuctlError:
    """Of a ``GoogleAPICallError``: Google has answered."""
    # "GET https://…/instances: Required 'compute.instances.list' permission for …"
    said = _line(str(error.message).partition(": ")[2] or str(error.message))
    reasons = {str(one.get("reason")) for one in _told(error)} | {str(error.reason)}
    if error.code == 401:
        return CredentialsRefused("Google Cloud does not take these credentials, or they have expired", _LOG_IN)
    if error.code is None or error.code >= 500 or error.code == 429 or reasons & {*_TOO_MANY}:
        return GpuctlError(f"Google Cloud answered {error.code}: {said}", "try again later")
    if reasons & {*_NOT_ENABLED}:
        return Disabled(said, f"enable it at {_enabling(error)}")
    if reasons & {*_NO_PROJECT} or (error.code == 404 and _is_about_project(said)):
        return NotThere(
            f"there is no such Google Cloud project, or it is not yours: {said}", "set GOOGLE_CLOUD_PROJECT"
        )
    if error.code == 403:
        return Denied(f"these Google Cloud credentials may not do this: {said}", "ask who manages the project")
    if error.code == 404:
        return NotThere(said)
    return GpuctlError(f"Google Cloud refused: {said}")


def _told(error: Any) -> list[Mapping[str, Any]]:
    return [one for one in error.errors or () if isinstance(one, Mapping)]


def _is_about_project(said: str) -> bool:
    """ "The resource 'projects/nope' was not found", and no resource in a project."""
    named = said.partition("'projects/")[2].partition("'")[0]
    return bool(named) and "/" not in named


def _enabling(error: Any) -> str:
    service = (error.metadata or {}).get("service", "compute.googleapis.com")
    return f"{CONSOLE}/apis/library/{service}"


def _no_credentials(error: Any) -> CredentialsRefused:
    said = _line(str(error))
    if "credentials were not found" in said:
        return CredentialsRefused("there are no Google Cloud credentials", _LOG_IN)
    return CredentialsRefused(f"the Google Cloud credentials cannot be read: {said}", _LOG_IN)


def _not_taken(error: Any) -> CredentialsRefused:
    said = _line(str(error.args[0] if error.args else error))
    if ("invalid_grant" in said and "JWT" not in said) or "reauth" in said.lower():
        return CredentialsRefused("the Google Cloud credentials have expired, or were revoked", _LOG_IN)
    return CredentialsRefused(f"Google does not take these credentials: {said}", _LOG_IN)


def _line(said: str) -> str:
    return " ".join(said.split())[:200]


def _place(scope: str) -> str:
    return last(scope)


def _of_environment(names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _endpoint(service: str) -> str:
    """Another one than Google's own, without its path; empty: none is named."""
    named = urlsplit(os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}", ""))
    return f"{named.scheme}://{named.netloc}" if named.netloc else ""


def _google(module: str) -> Any:
    """It weighs more than a second, which verbs that ask no cloud should not take; and a type checker that read all of
    Compute Engine's classes would take minutes."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise needs("gcp", error) from error
