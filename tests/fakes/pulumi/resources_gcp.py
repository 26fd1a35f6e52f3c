"""What ``resource_plugin`` makes in a project of Google Cloud on loopback (``google_held``): as much as the rest of
gpuctl asks for there, by the requests that Pulumi's provider would send."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.fakes.gcp.api import PROJECT, URL

Record = dict[str, Any]

_OF_ALL = f"projects/{PROJECT}"
_COMPUTE = "/compute/v1"
_BUCKETS = "/storage/v1/b"
_of_bucket = threading.Lock()
"""Terraform's provider changes one policy at a time, too."""


class Refused(Exception):
    """In the words of Google's Go client."""


def _ask(method: str, path: str, body: Record | None = None) -> Record:
    """All services are one server here."""
    url = f"{os.environ['CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE']}{path}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=30) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise Refused(f"googleapi: Error {error.code}: {json.load(error)['error']['message']}") from error


def _bucket(inputs: Record) -> Record:
    _ask("POST", f"{_BUCKETS}?project={PROJECT}", {key: inputs[key] for key in ("name", "location", "labels")})
    return {"id": inputs["name"], "name": inputs["name"]}


def _reader(inputs: Record) -> Record:
    """A policy is a set: what is in it already is not added once more."""
    binding = {"role": inputs["role"], "members": [inputs["member"]]}
    if "condition" in inputs:
        binding["condition"] = inputs["condition"]
    with _of_bucket:
        policy = _ask("GET", f"{_BUCKETS}/{inputs['bucket']}/iam")
        if binding not in policy["bindings"]:
            _ask("PUT", f"{_BUCKETS}/{inputs['bucket']}/iam", {**policy, "bindings": [*policy["bindings"], binding]})
    return {"id": f"{inputs['bucket']} {inputs['role']} {inputs['member']}"}


def _no_reader(id_: str) -> None:
    """Where the bucket is gone, so is the binding: Terraform's provider takes the 404 for that."""
    bucket, role, member = id_.split(" ")
    with _of_bucket:
        try:
            policy = _ask("GET", f"{_BUCKETS}/{bucket}/iam")
        except Refused as refused:
            if "Error 404" in str(refused):
                return
            raise
        left = [one for one in policy["bindings"] if (one["role"], one["members"]) != (role, [member])]
        _ask("PUT", f"{_BUCKETS}/{bucket}/iam", {**policy, "bindings": left})


def _reads(id_: str) -> bool:
    bucket, role, member = id_.split(" ")
    path = f"{_BUCKETS}/{bucket}"
    return _is_there(path) and _binds(_ask("GET", f"{path}/iam"), role, member)


def _binds(policy: Record, role: str, member: str) -> bool:
    return any((one["role"], one["members"]) == (role, [member]) for one in policy["bindings"])


def _of_compute(
    collection: str, place: str, body: Callable[[Record], Record] = lambda inputs: inputs
) -> Callable[[Record], Record]:
    """``place``: such as ``zones/{zone}``."""

    def make(inputs: Record) -> Record:
        where = f"{_OF_ALL}/{place.format(**inputs)}/{collection}"
        name = inputs.get("name") or f"{inputs['namePrefix']}{os.urandom(4).hex()}"
        _ask("POST", f"{_COMPUTE}/{where}", {**body(inputs), "name": name})
        id_ = f"{where}/{name}"
        return {"id": id_, "name": name, "selfLink": f"{URL.removesuffix(_OF_ALL)}{id_}"}

    return make


def _patch(*keys: str) -> Callable[[str, Record, Record], Record]:
    """What has changed of ``keys``, and nothing else: so do the updates of Terraform's provider."""

    def update(id_: str, before: Record, inputs: Record) -> Record:
        changed = {key: value for key, value in inputs.items() if before.get(key) != value}
        if other := {*changed, *(before.keys() - inputs.keys())} - {*keys}:
            raise NotImplementedError(f"the stand-in cannot update {', '.join(sorted(other))} of {id_}")
        _ask("PATCH", f"{_COMPUTE}/{id_}", changed)
        return {}

    return update


def _is_there(path: str) -> bool:
    try:
        return bool(_ask("GET", path))
    except Refused as refused:
        if "Error 404" in str(refused):
            return False
        raise


def _template(inputs: Record) -> Record:
    same = ("labels", "machineType", "networkInterfaces", "scheduling")
    return {"properties": {key: inputs[key] for key in same}}


def _service_account(inputs: Record) -> Record:
    shown = {"displayName": inputs["displayName"]}
    email = _ask("POST", f"/v1/{_OF_ALL}/serviceAccounts", {"accountId": inputs["accountId"], "serviceAccount": shown})[
        "response"
    ]["email"]
    return {"id": f"{_OF_ALL}/serviceAccounts/{email}", "email": email}


def _role(inputs: Record) -> Record:
    """As Terraform's provider does: one that was deleted is brought back, and then told what it is to be."""
    name = f"{_OF_ALL}/roles/{inputs['roleId']}"
    role = {"title": inputs["title"]}
    try:
        _ask("POST", f"/v1/{_OF_ALL}/roles", {"roleId": inputs["roleId"], "role": role})
    except Refused as refused:
        if "deleted state" not in str(refused):
            raise
        _ask("POST", f"/v1/{name}:undelete", {})
        _ask("PATCH", f"/v1/{name}", role)
    return {"id": name, "name": name}


def _tag(kind: str) -> Callable[[Record], Record]:
    def make(inputs: Record) -> Record:
        return {"id": _ask("POST", f"/v3/{kind}", inputs)["id"], "name": inputs["shortName"]}

    return make


def _member(inputs: Record) -> Record:
    policy = _policy()
    policy["bindings"].append({"role": inputs["role"], "members": [inputs["member"]], "condition": inputs["condition"]})
    _ask("POST", f"/v1/{_OF_ALL}:setIamPolicy", {"policy": policy})
    return {"id": f"{inputs['role']} {inputs['member']}"}


def _no_member(id_: str) -> None:
    role, _, member = id_.partition(" ")
    policy = _policy()
    policy["bindings"] = [one for one in policy["bindings"] if (one["role"], one["members"]) != (role, [member])]
    _ask("POST", f"/v1/{_OF_ALL}:setIamPolicy", {"policy": policy})


def _policy() -> Record:
    return _ask("POST", f"/v1/{_OF_ALL}:getIamPolicy", {})


MAKERS: dict[str, Callable[[Record], Record]] = {
    "gcp:storage/bucket:Bucket": _bucket,
    "gcp:storage/bucketIAMMember:BucketIAMMember": _reader,
    "gcp:compute/network:Network": _of_compute("networks", "global"),
    "gcp:compute/subnetwork:Subnetwork": _of_compute("subnetworks", "regions/{region}"),
    "gcp:compute/firewall:Firewall": _of_compute("firewalls", "global"),
    "gcp:compute/resourcePolicy:ResourcePolicy": _of_compute("resourcePolicies", "regions/{region}"),
    "gcp:compute/instanceTemplate:InstanceTemplate": _of_compute("instanceTemplates", "global", _template),
    "gcp:compute/instanceGroupManager:InstanceGroupManager": _of_compute("instanceGroupManagers", "zones/{zone}"),
    "gcp:serviceaccount/account:Account": _service_account,
    "gcp:projects/iAMCustomRole:IAMCustomRole": _role,
    "gcp:projects/iAMMember:IAMMember": _member,
    "gcp:tags/tagKey:TagKey": _tag("tagKeys"),
    "gcp:tags/tagValue:TagValue": _tag("tagValues"),
}
UPDATERS: dict[str, Callable[[str, Record, Record], Record]] = {
    "gcp:compute/firewall:Firewall": _patch("allows", "description", "sourceRanges", "sourceTags", "targetTags"),
    "gcp:compute/instanceGroupManager:InstanceGroupManager": _patch("versions", "updatePolicy"),
}
_OF_IAM = ("gcp:serviceaccount/account:Account", "gcp:projects/iAMCustomRole:IAMCustomRole")
REPLACED = ("gcp:compute/instanceTemplate:InstanceTemplate",)
UNMAKERS: dict[str, Callable[[str, Record], object]] = {
    **{kind: lambda id_, _: _ask("DELETE", f"{_COMPUTE}/{id_}") for kind in MAKERS if kind.startswith("gcp:compute/")},
    **{kind: lambda id_, _: _ask("DELETE", f"/v1/{id_}") for kind in _OF_IAM},
    **{kind: lambda id_, _: _ask("DELETE", f"/v3/{id_}") for kind in MAKERS if kind.startswith("gcp:tags/")},
    "gcp:projects/iAMMember:IAMMember": lambda id_, _: _no_member(id_),
    "gcp:storage/bucketIAMMember:BucketIAMMember": lambda id_, _: _no_reader(id_),
}
SEEN: dict[str, Callable[[str], bool]] = {
    **{kind: lambda id_: _is_there(f"{_COMPUTE}/{id_}") for kind in MAKERS if kind.startswith("gcp:compute/")},
    **{kind: lambda id_: _is_there(f"/v1/{id_}") for kind in _OF_IAM},
    **{kind: lambda id_: _is_there(f"/v3/{id_}") for kind in MAKERS if kind.startswith("gcp:tags/")},
    "gcp:projects/iAMMember:IAMMember": lambda id_: _binds(_policy(), *id_.split(" ")),
    "gcp:storage/bucket:Bucket": lambda id_: _is_there(f"{_BUCKETS}/{id_}"),
    "gcp:storage/bucketIAMMember:BucketIAMMember": _reads,
}
