"""Calls to Azure, with the credentials and the subscription that Microsoft's own tools would take.

Credentials are those of ``azure-identity``'s usual chain, which ends with ``az login``; what Pulumi is given by
``ARM_CLIENT_ID`` and its like goes before, so that all of gpuctl is one user.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import CredentialsRefused
from gpuctl.stacks.clouds.azure.error_mapping import CHOOSE, LOG_IN, understood
from gpuctl.stacks.clouds.extras import needs

Answer = dict[str, Any]
"""One thing, as Azure's REST API has it."""

PORTAL = "https://portal.azure.com"
_API = "https://management.azure.com"
_SUBSCRIPTIONS = "2022-12-01"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class AzureAccount:
    """A subscription, and how it is asked. Any thread may ask."""

    def __init__(self, subscription: str, credential: Any, endpoint: str = _API) -> None:
        self.subscription = subscription
        self._credential = credential
        self._endpoint = endpoint

    @cached_property
    def compute(self) -> Any:
        """The subscription's ``ComputeManagementClient``."""
        try:
            from azure.mgmt.compute import ComputeManagementClient
        except ModuleNotFoundError as error:
            raise needs("azure", error) from error
        return ComputeManagementClient(self._credential, self.subscription, self._endpoint, **self._options())

    @cached_property
    def network(self) -> Any:
        """The subscription's ``NetworkManagementClient``."""
        try:
            from azure.mgmt.network import NetworkManagementClient
        except ModuleNotFoundError as error:
            raise needs("azure", error) from error
        return NetworkManagementClient(self._credential, self.subscription, self._endpoint, **self._options())

    def claims(self) -> Answer:
        """The token's claims, which tell who uses it; empty if it is none that can be read. Raises
        ``CredentialsRefused``."""
        with understood():
            token = self._credential.get_token(f"{self._endpoint}/.default").token
        payload = token.split(".")[1] if token.count(".") == 2 else ""
        try:
            told: Answer = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        except ValueError:
            return {}
        return told

    def got(self, path: str, version: str, **query: str) -> Answer:
        """One answer of the API, for what the clients of ``azure-mgmt-compute`` and its like do not know. A path is
        below the subscription, unless it begins with ``/``. Raises ``GpuctlError``."""
        at = path if path.startswith("/") else f"/subscriptions/{self.subscription}/{path}".rstrip("/")
        return self._asked(at, {**query, "api-version": version})

    def listed(self, path: str, version: str, **query: str) -> Iterator[Answer]:
        """All pages of a list; else as ``got``."""
        page = self.got(path, version, **query)
        yield from page.get("value", ())
        while link := page.get("nextLink"):
            page = self._asked(link, None)
            yield from page.get("value", ())

    def sent(self, method: str, url: str, query: dict[str, str] | None = None) -> Any:
        """Any request, its answer as ``azure.core`` has it. A ``url`` without a host is of the API. Raises
        ``GpuctlError``: ``NotFound``, ``RetryLater`` or ``Denied`` among others."""
        with understood():
            from azure.core.rest import HttpRequest

            response = self.compute.send_request(HttpRequest(method, url, params=query))
            response.raise_for_status()
        return response

    def _asked(self, url: str, query: dict[str, str] | None) -> Answer:
        with understood():
            answer: Answer = self.sent("GET", url, query).json()
        return answer

    def _options(self) -> dict[str, Any]:
        """Azure's clients would register the subscription for what it has not used yet, on the way: not here, where all
        is only looked at."""
        from azure.core.pipeline import policies
        from azure.mgmt.core.policies import ARMChallengeAuthenticationPolicy

        chain = [
            policies.UserAgentPolicy("gpuctl"),
            policies.ProxyPolicy(),
            policies.ContentDecodePolicy(),
            policies.RedirectPolicy(),
            policies.RetryPolicy(retry_total=3),
            ARMChallengeAuthenticationPolicy(self._credential, f"{self._endpoint}/.default"),
            policies.SensitiveHeaderCleanupPolicy(),
        ]
        if urlsplit(self._endpoint).hostname in _LOOPBACK:
            chain.insert(0, _WithoutTls())
        return {"policies": chain, "connection_timeout": 10, "read_timeout": 60}


def own(region: str) -> str:  # noqa: ARG001
    """See ``Cloud.account``: the subscription, which is in no region."""
    account = connecting()
    who(account)
    return account.subscription


def reader(account: AzureAccount | None = None) -> str:
    """See ``Cloud.reader``: whose log-in this is, as its token tells (learn.microsoft.com, "Access token claims
    reference": only a person's has ``scp``); empty if it is none that can be read."""
    claims = (account or connecting()).claims()
    kind = "User" if "scp" in claims or claims.get("idtyp") == "user" else "ServicePrincipal"
    return f"{kind}:{claims['oid']}" if claims.get("oid") else ""


def connecting(subscription: str = "", credential: Any = None, endpoint: str = "") -> AzureAccount:
    """Connect to the subscription that is named, or to the default one. ``ARM_ENDPOINT`` is where Azure's API is, if it
    is elsewhere. Raises ``BadInput`` if Azure's packages are not installed or nobody has said which subscription of
    several, ``CredentialsRefused`` if that must be asked and may not be."""
    credential = credential or _credential()
    endpoint = (endpoint or os.environ.get("ARM_ENDPOINT") or _API).rstrip("/")
    return AzureAccount(
        subscription or _usual_subscription(AzureAccount("", credential, endpoint)), credential, endpoint
    )


def pulumi_has_a_log_in() -> bool:
    """Whether Pulumi has a login of its own, by ``ARM_CLIENT_ID`` and its like. Without one it is to take
    ``azure-identity``'s usual chain, as the rest of gpuctl does."""
    return any(value for name, value in os.environ.items() if name.startswith("ARM_CLIENT_"))


def who(account: AzureAccount) -> Answer:
    """The subscription: ``displayName``, ``state``, ``tenantId``. All who may do anything with it may ask this. Raises
    ``GpuctlError``."""
    return account.got("", _SUBSCRIPTIONS)


# -- credentials ------------------------------------------------------------------------------------------------------


class _WithoutTls:
    """A policy of azure.core's: tokens go to loopback in the clear, where there is no certificate."""

    next: Any

    def send(self, request: Any) -> Any:
        request.context.options["enforce_https"] = False
        return self.next.send(request)


def _credential() -> Any:
    # It weighs a quarter of a second, which verbs that ask no cloud should not take.
    try:
        from azure.identity import ClientSecretCredential, DefaultAzureCredential
    except ModuleNotFoundError as error:
        raise needs("azure", error) from error
    # They say what they have tried on standard error, and once more in what they raise.
    logging.getLogger("azure").addHandler(logging.NullHandler())
    pulumis = [os.environ.get(f"ARM_{name}", "") for name in ("TENANT_ID", "CLIENT_ID", "CLIENT_SECRET")]
    try:
        return ClientSecretCredential(*pulumis) if all(pulumis) else DefaultAzureCredential()
    except ValueError as error:
        raise CredentialsRefused(f"Azure: {' '.join(str(error).split())[:200]}", LOG_IN) from error


def _usual_subscription(anyone: AzureAccount) -> str:
    """The one that the environment names, that ``az account set`` chose, or that is the only one."""
    for name in ("ARM_SUBSCRIPTION_ID", "AZURE_SUBSCRIPTION_ID"):
        if named := os.environ.get(name):
            return named
    if chosen := _chosen():
        return chosen
    found: list[str] = [one["subscriptionId"] for one in anyone.listed("/subscriptions", _SUBSCRIPTIONS)]
    if not found:
        raise GpuctlError("these Azure credentials see no subscription", "ask the tenant's administrator")
    if len(found) > 1:
        raise BadInput(f"these Azure credentials see {len(found)} subscriptions", CHOOSE)
    return found[0]


def _chosen() -> str:
    """The subscription chosen with ``az``, from its own file, which is read at once where ``az`` takes a second to say
    the same."""
    folder = os.environ.get("AZURE_CONFIG_DIR") or Path.home() / ".azure"
    try:
        profile = json.loads((Path(folder) / "azureProfile.json").read_text("utf-8-sig"))
        return next((str(one["id"]) for one in profile["subscriptions"] if one.get("isDefault")), "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""
