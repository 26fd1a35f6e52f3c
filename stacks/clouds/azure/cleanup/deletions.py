"""Deletes things by their ids, and waits until Azure says of each that it is gone.

Azure takes minutes, and refuses what is in use: by another that goes at the same time, or by one of which it has not
yet noticed that it is gone. So all that may go at once is begun at once, and what is refused for now is begun again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import CredentialsRefused
from gpuctl.stacks.clouds.azure.client import AzureAccount
from gpuctl.stacks.clouds.azure.error_mapping import NotFound, RetryLater, refused
from gpuctl.stacks.clouds.azure.ids import is_group, type_of

GROUPS, ROLES = "2021-04-01", "2022-04-01"
"""Versions of the API."""
PATIENCE_S = 15 * 60.0
"""In which nothing has gone: a scale set with InfiniBand, or a group with one, takes some ten minutes."""
_LOOK_S = 5.0


class DeletionTarget(NamedTuple):
    what: str
    """For people, such as ``disk gpuctl-demo/by-hand``."""
    id: str


@dataclass(slots=True)
class _Going:
    it: DeletionTarget
    url: str = ""
    """Where Azure tells how far it is; empty: it has yet to be begun."""
    reason: str = "Azure is not done with it yet"


class Deletions:
    """Deletes resources in one subscription.

    Args:
        account: the subscription, with credentials that may delete in it.
        say: is told of each resource that it was deleted, or that it stays and why.
        pause: sleeps for so many seconds between two looks.
        now: a clock in seconds, for the deadline.
    """

    def __init__(
        self,
        account: AzureAccount,
        say: Callable[[str], None],
        pause: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._account = account
        self._say = say
        self._pause = pause
        self._now = now
        self._versions = cache(self._known_versions)

    def run(self, doomed: Sequence[DeletionTarget]) -> list[DeletionTarget]:
        """All at once. What is gone already is no failure. Returns what stays, and tells by ``say`` why. Raises
        ``CredentialsRefused``: there is no use in going on then."""
        going, left = [_Going(one) for one in doomed], list[DeletionTarget]()
        until = self._now() + PATIENCE_S
        while going:
            steps = [(one, self._step(one)) for one in going]
            left += [one.it for one, step in steps if step == "stays"]
            still = [one for one, step in steps if step == "goes on"]
            if len(still) < len(going):
                until = self._now() + PATIENCE_S
            going = still
            if going and self._now() >= until:
                for one in going:
                    self._say(f"{one.it.what} was not deleted: {one.reason}")
                return [*left, *(one.it for one in going)]
            if going:
                self._pause(_LOOK_S)
        return left

    def version(self, id_: str) -> str:
        """The API version for resources of its type: the newest that is no preview. Raises ``GpuctlError``."""
        if is_group(id_):
            return GROUPS
        type_ = type_of(id_)
        provider, _, kind = type_.partition("/")
        if provider == "microsoft.authorization":
            return ROLES
        known = self._versions(provider).get(kind, [])
        if not known:
            raise GpuctlError(f"Azure reports no API version for {type_}", "delete it by hand")
        return max(known, key=lambda version: ("preview" not in version, version))

    def _step(self, one: _Going) -> Literal["gone", "stays", "goes on"]:
        try:
            one.url = self._look(one.url) if one.url else self._begin(one.it.id)
        except RetryLater as error:
            one.url, one.reason = "", error.message
            return "goes on"
        except CredentialsRefused:
            raise
        except GpuctlError as error:
            self._say(f"{one.it.what} was not deleted: {error.message}")
            return "stays"
        if one.url:
            return "goes on"
        self._say(f"deleted {one.it.what}")
        return "gone"

    def _begin(self, id_: str) -> str:
        try:
            answer = self._account.sent("DELETE", id_, {"api-version": self.version(id_)})
        except NotFound:
            return ""
        if answer.status_code != 202:
            return ""
        headers = answer.headers
        return str(headers.get("Azure-AsyncOperation") or headers.get("Location") or "")

    def _look(self, url: str) -> str:
        """The same again; empty: it is done. learn.microsoft.com, "Track asynchronous Azure operations"."""
        try:
            answer = self._account.sent("GET", url)
        except NotFound:
            return ""
        if answer.status_code == 202:
            return url
        told: dict[str, Any] = answer.json() if answer.text() else {}
        status = told.get("status", "Succeeded")
        if status in ("Failed", "Canceled"):
            error = told.get("error") or {}
            raise refused(str(error.get("code", status)), str(error.get("message", "")))
        return "" if status == "Succeeded" else url

    def _known_versions(self, provider: str) -> dict[str, list[str]]:
        """API versions by kind, in lower case."""
        told = self._account.got(f"providers/{provider}", GROUPS)
        return {one["resourceType"].lower(): one["apiVersions"] for one in told["resourceTypes"]}
