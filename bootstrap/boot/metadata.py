"""Who this machine is, and its rights: what the cloud's metadata service says. On ``ssh`` there is none.

Sources: Amazon EC2 user guide, "Instance metadata categories" and IMDSv2; Google Compute Engine, "About VM metadata";
Azure, "Instance Metadata Service". All three answer on 169.254.169.254, and never through a proxy.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

_SESSION_S = 6 * 3600
_AZURE = "/metadata/instance?api-version=2021-02-01"


@dataclass(frozen=True)
class Instance:
    """This machine's identity in its cloud; fields the cloud does not report are empty."""

    id: str
    """Its node's name too. Of a scale set's machine ``SET_N``, of Google's the name, which the shrink call wants."""
    address: str = ""
    public_address: str = ""
    zone: str = ""
    region: str = ""
    type: str = ""
    group: str = ""
    """What it shrinks when it leaves: AWS a name, Google ``projects/…/instanceGroupManagers/…``, Azure the set's id."""
    life: str = ""
    """``spot`` or ``on-demand``."""


@dataclass(frozen=True)
class Credentials:
    """Temporary AWS access keys."""

    key: str
    secret: str
    token: str = ""


class Metadata:
    """The cloud's metadata service. Raises ``OSError`` where the service is silent or refuses, ``ValueError`` or
    ``LookupError`` where it answers nonsense."""

    def __init__(self, provider: str, *, endpoint: str = "", timeout_s: float = 2.0, identity: str = "") -> None:
        """``identity``: resource id of the one that tokens are for, on Azure, where a machine may have several."""
        self.provider = provider
        self._identity = identity
        known = endpoint or os.environ.get("GPUCTL_METADATA") or "http://169.254.169.254"
        self.endpoint = known.rstrip("/")
        self._timeout_s = timeout_s
        self.date = ""
        """When the service gave its last answer, by its own clock (the header ``Date``)."""
        self.etag = ""
        """Of its last answer (the header ``ETag``); empty where there is none."""
        self._session = ""
        self._opener = build_opener(ProxyHandler({}))

    def instance(self) -> Instance:
        """A machine of ``ssh`` is what it calls itself, at the address that leads out, if one does."""
        told = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}.get(self.provider)
        return told() if told else Instance(socket.gethostname(), _way_out())

    def aws_credentials(self) -> Credentials:
        """Credentials of the instance's role; they last for hours, so ask anew where they are refused."""
        folder = "/latest/meta-data/iam/security-credentials/"
        told = _object(self.need(folder + self.need(folder).split()[0]))
        return Credentials(told["AccessKeyId"], told["SecretAccessKey"], told["Token"])

    def token(self, resource: str) -> str:
        """Bearer token of the machine's account; ``resource`` (Azure alone asks) is whom it is for."""
        path = "/computeMetadata/v1/instance/service-accounts/default/token"
        if self.provider == "azure":
            path = f"/metadata/identity/oauth2/token?api-version=2018-02-01&resource={quote(resource, safe='')}"
            path += f"&msi_res_id={quote(self._identity, safe='')}" if self._identity else ""
        return str(_object(self.need(path))["access_token"])

    def need(self, path: str, timeout_s: float = 0.0) -> str:
        """``get`` of what must be there."""
        found = self.get(path, timeout_s)
        if found is None:
            raise OSError(f"the metadata service has no {path}")
        return found

    def get(self, path: str, timeout_s: float = 0.0) -> str | None:
        """``None`` where there is nothing of the kind. An AWS session that has ended is begun anew."""
        if self.provider == "aws" and not self._session:
            self._begin_session()
        try:
            return self._ask("GET", path, timeout_s=timeout_s)
        except HTTPError as error:
            if error.code != 401 or self.provider != "aws":
                raise
        self._begin_session()
        return self._ask("GET", path, timeout_s=timeout_s)

    def post(self, path: str, data: object) -> None:
        """Tell the service something (Azure's scheduled events)."""
        self._ask("POST", path, json.dumps(data).encode())

    def _begin_session(self) -> None:
        self._session = ""
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_SESSION_S)}
        self._session = self._ask("PUT", "/latest/api/token", headers=ttl) or ""

    def _ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 0,
    ) -> str | None:
        proof = {
            "aws": {"X-aws-ec2-metadata-token": self._session} if self._session else {},
            "gcp": {"Metadata-Flavor": "Google"},
            "azure": {"Metadata": "true"},
        }
        request = Request(self.endpoint + path, data, {**proof[self.provider], **(headers or {})}, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s or self._timeout_s) as answer:
                self.date, self.etag = (answer.headers.get(name) or "" for name in ("Date", "ETag"))
                return str(answer.read().decode())
        except HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise
        except HTTPException as error:
            raise OSError(f"the metadata service failed: {error!r}") from error

    def _aws(self) -> Instance:
        def told(name: str) -> str:
            return (self.get(f"/latest/meta-data/{name}") or "").strip()

        return Instance(
            id=self.need("/latest/meta-data/instance-id").strip(),
            address=told("local-ipv4"),
            public_address=told("public-ipv4"),
            zone=told("placement/availability-zone"),
            region=told("placement/region"),
            type=told("instance-type"),
            group=told("tags/instance/aws:autoscaling:groupName"),
            life=told("instance-life-cycle"),
        )

    def _gcp(self) -> Instance:
        def told(name: str) -> str:
            return (self.get(f"/computeMetadata/v1/instance/{name}") or "").strip()

        zone = told("zone").rpartition("/")[2]
        group = told("attributes/created-by")
        return Instance(
            id=self.need("/computeMetadata/v1/instance/name").strip(),
            address=told("network-interfaces/0/ip"),
            public_address=told("network-interfaces/0/access-configs/0/external-ip"),
            zone=zone,
            region=zone.rpartition("-")[0],
            type=told("machine-type").rpartition("/")[2],
            group=group if "/instanceGroupManagers/" in group else "",
            life="spot" if told("scheduling/preemptible") == "TRUE" else "on-demand",
        )

    def _azure(self) -> Instance:
        told = _object(self.need(_AZURE))
        compute, group = told["compute"], ""
        if "/virtualMachines/" in compute.get("resourceId", "") and compute.get("vmScaleSetName"):
            group = compute["resourceId"].partition("/virtualMachines/")[0]
        cards = told.get("network", {}).get("interface") or [{}]
        address = (cards[0].get("ipv4", {}).get("ipAddress") or [{}])[0]
        region, zone = compute.get("location", ""), compute.get("zone", "")
        return Instance(
            id=compute["name"],
            address=address.get("privateIpAddress", ""),
            public_address=address.get("publicIpAddress", ""),
            zone=f"{region}-{zone}" if zone else "",
            region=region,
            type=compute.get("vmSize", ""),
            group=group,
            life="spot" if compute.get("priority") == "Spot" else "on-demand",
        )


def _object(text: str) -> Any:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"the metadata service says {text[:80]!r}")  # noqa: TRY004 - as json's own errors are
    return found


def _way_out() -> str:
    """Address of the interface that leads out; empty where none does, or none yet. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
