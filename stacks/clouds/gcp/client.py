"""Calls to Google Cloud, with the credentials and the project of the environment as Google's own tools find them.

Compute Engine is asked through google-cloud-compute, over REST. What has no such client in gpuctl's dependencies (IAM,
Resource Manager, billing) is asked with the same credentials and plain requests. Other endpoints are taken from
``CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE`` and its like, as gcloud does.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.gcp.error_mapping import Unreachable, google, understood

Answer = dict[str, Any]
"""One thing, as Google's JSON has it."""

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_PROJECT_FROM = ("GOOGLE_PROJECT", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
"""In the order of Pulumi's provider, so that all of gpuctl means the same project."""
_ONE_REQUEST_S = 60.0
_ALL_ATTEMPTS_S = 90.0
_PAGE = 500
"""The most that Compute Engine gives at once."""


class GcpAccount:
    """Credentials, and the project that they are used in. Any thread may ask."""

    def __init__(self, credentials: Any, project: str, key: str = "") -> None:
        self._credentials = credentials
        self._project = project
        self._key = key
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._session = google("google.auth.transport.requests").AuthorizedSession(credentials)

    @property
    def project(self) -> str:
        """Raises ``BadInput`` if neither a request nor the environment names one."""
        if not self._project:
            raise BadInput(
                "no Google Cloud project is set",
                "set GOOGLE_CLOUD_PROJECT (gcloud config set project does, where gcloud is installed)",
            )
        return self._project

    @property
    def who(self) -> str:
        """The service account, if it is one: nothing tells a user's name without asking for it."""
        return str(getattr(self._credentials, "service_account_email", "") or "a user")

    def log_in(self) -> GcpAccount:
        """So that credentials that are refused are told once, and in words. Raises ``CredentialsRefused``."""
        with understood():
            self._credentials.refresh(google("google.auth.transport.requests").Request())
        return self

    def compute(self, kind: str, method: str, **asked: Any) -> Any:
        """The answer of Compute Engine to a method of the client for ``kind``, such as ``Instances``. Raises
        ``GpuctlError``; ``asked`` are fields of the request, and a misspelt one is a ``ValueError``."""
        try:
            call = getattr(self._client(kind), method)
        except AttributeError as error:
            hint = "pip install --upgrade google-cloud-compute"
            raise GpuctlError(f"the installed google-cloud-compute has no {kind}.{method}", hint) from error
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
        self,
        service: str,
        path: str,
        body: Answer | None = None,
        query: Mapping[str, str | int] | None = None,
        *,
        method: str = "",
    ) -> Answer:
        """Send a request for JSON to ``https://<service>.googleapis.com/<path>``. No content is an empty answer.

        Args:
            service: the API's name in its host's name, such as ``iam``.
            path: without a slash at its beginning, as in ``v1/projects/…``.
            body: sent as JSON; ``None``: the request has no body.
            query: parameters of the URL.
            method: of HTTP; empty: POST if there is a ``body``, else GET.

        Raises ``GpuctlError``.
        """
        url = f"{_endpoint(service) or f'https://{service}.googleapis.com'}/{path}"
        method = method or ("GET" if body is None else "POST")
        with understood():
            response = self._session.request(
                method, url, params=query, json=body, headers=self._headers(), timeout=_ONE_REQUEST_S
            )
            if response.status_code >= 400:
                raise google("google.api_core.exceptions").from_http_response(response)
        if response.status_code == 204:
            return {}
        try:
            answer = response.json()
        except ValueError as error:
            raise GpuctlError("the response is not from Google's API", "is there a proxy in between?") from error
        if not isinstance(answer, dict):
            raise GpuctlError("the response is not from Google's API", "is there a proxy in between?")
        return answer

    def pages(self, service: str, path: str, **query: str | int) -> Iterator[Answer]:
        """All pages of a list."""
        page = self.ask(service, path, query=query)
        yield page
        while token := page.get("nextPageToken"):
            page = self.ask(service, path, query={**query, "pageToken": token})
            yield page

    def _headers(self) -> dict[str, str]:
        """A person's credentials are of no project, and these services want to know whose quota a request uses."""
        if self._key:
            return {"X-Goog-Api-Key": self._key}
        person = isinstance(self._credentials, google("google.oauth2.credentials").Credentials)
        if person and self._project and not self._credentials.quota_project_id:
            return {"X-Goog-User-Project": self._project}
        return {}

    def _client(self, kind: str) -> Any:
        with self._lock:
            if kind not in self._clients:
                endpoint = _endpoint("compute")
                self._clients[kind] = getattr(google("google.cloud.compute_v1"), f"{kind}Client")(
                    credentials=self._credentials,
                    transport="rest",
                    client_options={"api_endpoint": endpoint} if endpoint else None,
                )
            return self._clients[kind]

    def _retry(self) -> Any:
        """The retry policy for what Google says is worth retrying; the clients' own would go on for ten minutes."""
        retrying, errors = google("google.api_core.retry"), google("google.api_core.exceptions")
        passing = (errors.TooManyRequests, errors.ServiceUnavailable, errors.GatewayTimeout)
        return retrying.Retry(retrying.if_exception_type(*passing), initial=0.5, timeout=_ALL_ATTEMPTS_S)


def own(region: str) -> str:  # noqa: ARG001
    """See ``Cloud.account``: the project, which is in no region."""
    return entering().project


def entering(project: str = "") -> GcpAccount:
    """``project``, or else the one of the environment. Raises ``BadInput`` if Google's packages are not installed,
    ``CredentialsRefused`` if there are no credentials."""
    auth = google("google.auth")
    with understood(), warnings.catch_warnings(action="ignore"):  # of log-ins by people, to those who write programs
        credentials, own = auth.default(scopes=[_SCOPE])
    return GcpAccount(credentials, project or _of_environment(_PROJECT_FROM) or own or "")


def entering_with_key(key: str) -> GcpAccount:
    """An account for what an API key opens, such as price lists: no project, no credentials."""
    return GcpAccount(google("google.auth.credentials").AnonymousCredentials(), "", key)


def last(url: str) -> str:
    """The name at the end of a resource's URL."""
    return url.rpartition("/")[2]


def _place(scope: str) -> str:
    return last(scope)


def _of_environment(names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _endpoint(service: str) -> str:
    """Another one than Google's own, without its path; empty: none is named."""
    named = urlsplit(os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}", ""))
    return f"{named.scheme}://{named.netloc}" if named.netloc else ""
