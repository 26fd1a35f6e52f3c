"""How Azure is asked, with the credentials and the subscription that Microsoft's own tools would take, and what its
refusals mean, in a line.

Credentials are those of ``azure-identity``'s usual chain, which ends with ``az login``; what Pulumi is given by
``ARM_CLIENT_ID`` and its like goes before, so that all of gpuctl is one user.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.cloud import CredentialsRefused, Denied, needs

Answer = dict[str, Any]
"""One thing, as Azure's REST API has it."""

PORTAL = "https://portal.azure.com"
_API = "https://management.azure.com"
_SUBSCRIPTIONS = "2022-12-01"
_LOG_IN = "log in (az login), or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"
_CHOOSE = "az account set --subscription NAME, or set AZURE_SUBSCRIPTION_ID"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NO_SUBSCRIPTION = ("SubscriptionNotFound", "InvalidSubscriptionId")
_UNREGISTERED = ("MissingSubscriptionRegistration", "SubscriptionNotRegistered")
_ACTION = re.compile(r"perform action '([^']+)'")
_ENTRA = re.compile(r"AADSTS\d+")
"""What Microsoft's log-in service calls its refusals."""


class Gone(GpuctlError):
    """There is no such thing."""


class Unregistered(GpuctlError):
    """The subscription has never used this part of Azure, so nothing of it is there."""


class Account:
    """A subscription, and how it is asked. Any thread may ask."""

    def __init__(self, subscription: str, credential: Any, endpoint: str = _API) -> None:
        self.subscription = subscription
        self._credential = credential
        self._endpoint = endpoint

    @cached_property
    def compute(self) -> Any:
        """A ``ComputeManagementClient``."""
        try:
            from azure.mgmt.compute import ComputeManagementClient
        except ModuleNotFoundError as error:
            raise needs("azure", error) from error
        return ComputeManagementClient(self._credential, self.subscription, self._endpoint, **self._options())

    @cached_property
    def network(self) -> Any:
        """A ``NetworkManagementClient``."""
        try:
            from azure.mgmt.network import NetworkManagementClient
        except ModuleNotFoundError as error:
            raise needs("azure", error) from error
        return NetworkManagementClient(self._credential, self.subscription, self._endpoint, **self._options())

    def claims(self) -> Answer:
        """What the token says of who uses it; empty if it is none that can be read. Raises ``CredentialsRefused``."""
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

    def _asked(self, url: str, query: dict[str, str] | None) -> Answer:
        with understood():
            from azure.core.rest import HttpRequest

            response = self.compute.send_request(HttpRequest("GET", url, params=query))
            response.raise_for_status()
            answer: Answer = response.json()
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
    """See ``cloud.Cloud.account``: the subscription, which is in no region."""
    account = connecting()
    who(account)
    return account.subscription


def reader(account: Account | None = None) -> str:
    """See ``cloud.Cloud.reader``: whose log-in this is, as its token tells (learn.microsoft.com, "Access token claims
    reference": only a person's has ``scp``); empty if it is none that can be read."""
    claims = (account or connecting()).claims()
    kind = "User" if "scp" in claims or claims.get("idtyp") == "user" else "ServicePrincipal"
    return f"{kind}:{claims['oid']}" if claims.get("oid") else ""


def connecting(subscription: str = "", credential: Any = None, endpoint: str = "") -> Account:
    """Of the subscription that is named, or of the usual one. ``ARM_ENDPOINT`` is where Azure's API is, if it is
    elsewhere. Raises ``BadInput`` if Azure's packages are not installed or nobody has said which subscription of
    several, ``CredentialsRefused`` if that must be asked and may not be."""
    credential = credential or _credential()
    endpoint = (endpoint or os.environ.get("ARM_ENDPOINT") or _API).rstrip("/")
    return Account(subscription or _usual_subscription(Account("", credential, endpoint)), credential, endpoint)


def pulumi_has_a_log_in() -> bool:
    """Of its own, by ``ARM_CLIENT_ID`` and its like. Without one it is to take ``azure-identity``'s usual chain, as the
    rest of gpuctl does."""
    return any(value for name, value in os.environ.items() if name.startswith("ARM_CLIENT_"))


def who(account: Account) -> Answer:
    """The subscription: ``displayName``, ``state``, ``tenantId``. All who may do anything with it may ask this. Raises
    ``GpuctlError``."""
    return account.got("", _SUBSCRIPTIONS)


@contextmanager
def understood() -> Iterator[None]:
    """What Azure's packages raise within becomes a ``GpuctlError``."""
    try:
        from azure.core.exceptions import AzureError, ClientAuthenticationError, DecodeError, HttpResponseError
    except ModuleNotFoundError as error:
        raise needs("azure", error) from error
    try:
        yield
    except DecodeError as error:
        raise GpuctlError("what answers is not Azure's API", "is there a proxy in between?") from error
    except HttpResponseError as error:
        if isinstance(error, ClientAuthenticationError) and error.response is None:
            raise _no_token(error) from error
        raise _refusal(error) from error
    except AzureError as error:
        said = " ".join(str(error).split())
        raise GpuctlError(f"Azure does not answer: {said[:200]}", "is the network up?") from error
    except json.JSONDecodeError as error:  # which azure.core does not count among its own
        raise GpuctlError("what answers is not Azure's API", "is there a proxy in between?") from error


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
        raise CredentialsRefused(f"Azure: {' '.join(str(error).split())[:200]}", _LOG_IN) from error


def _usual_subscription(anyone: Account) -> str:
    """The one that the environment names, that ``az account set`` chose, or that is the only one."""
    for name in ("ARM_SUBSCRIPTION_ID", "AZURE_SUBSCRIPTION_ID"):
        if named := os.environ.get(name):
            return named
    if chosen := _chosen():
        return chosen
    found: list[str] = [one["subscriptionId"] for one in anyone.listed("/subscriptions", _SUBSCRIPTIONS)]
    if not found:
        raise GpuctlError("these Azure credentials see no subscription", "ask who manages the tenant")
    if len(found) > 1:
        raise BadInput(f"these Azure credentials see {len(found)} subscriptions", _CHOOSE)
    return found[0]


def _chosen() -> str:
    """By ``az``, in its own file, which is read at once where ``az`` takes a second to say the same."""
    folder = os.environ.get("AZURE_CONFIG_DIR") or Path.home() / ".azure"
    try:
        profile = json.loads((Path(folder) / "azureProfile.json").read_text("utf-8-sig"))
        return next((str(one["id"]) for one in profile["subscriptions"] if one.get("isDefault")), "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# -- refusals ---------------------------------------------------------------------------------------------------------


def _no_token(error: Any) -> CredentialsRefused:
    """Of ``azure-identity``, which tells what each of a dozen ways has said."""
    said = " ".join(str(error).split())
    code = _ENTRA.search(said)
    if "expired" in said.lower():
        return CredentialsRefused("the Azure log-in has expired", _LOG_IN)
    if code:
        return CredentialsRefused(f"Azure does not take these credentials ({code.group()})", _LOG_IN)
    return CredentialsRefused("there are no Azure credentials", _LOG_IN)


def _refusal(error: Any) -> GpuctlError:
    """Of an answer with an error in it."""
    status = error.status_code
    code, said = _told(error.response)
    if code in _NO_SUBSCRIPTION:
        return GpuctlError("these Azure credentials see no such subscription", f"see az account list; {_CHOOSE}")
    if code in _UNREGISTERED:
        return Unregistered(f"the subscription has never used this: {said}"[:200], "az provider register")
    if status == 401:
        if code == "ExpiredAuthenticationToken" or "expired" in said.lower():
            return CredentialsRefused("the Azure log-in has expired", _LOG_IN)
        return CredentialsRefused(f"Azure does not take these credentials here ({code or status})", _LOG_IN)
    if status == 403:
        action = _ACTION.search(said)
        what = f"call {action.group(1)}" if action else f"do this ({code})"
        return Denied(f"these Azure credentials may not {what}", "ask who manages the subscription")
    if status == 404:
        return Gone(f"Azure has it no more: {said or code}"[:200])
    if status is None or status >= 500 or status == 429:
        return GpuctlError(f"Azure answered {status}", "try again later")
    return GpuctlError(f"Azure refused: {code}: {said[:200]}")


def _told(response: Any) -> tuple[str, str]:
    """Code and message; both empty if it is a page for people."""
    try:
        error = json.loads(response.text())["error"]
        return str(error["code"]), " ".join(str(error.get("message", "")).split())
    except (AttributeError, KeyError, TypeError, ValueError):
        return "", ""
