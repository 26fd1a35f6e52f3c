"""A subscription of Azure's that things are made in and taken away from, below the server of ``azure_api``.

What is there is what somebody has put there, by its id, and the lists are of that. It holds to those of Azure's rules
that a cluster's life meets: a group ends with all that is in it, a thing that another refers to is not deleted, nobody
is given the same role twice, and a scale set makes the machines that it is told to have, where there is room for them.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.azure.api import SUBSCRIPTION, refusal
from tests.fakes.pulumi.resources_azure import USER

Thing = dict[str, Any]
ROOT = f"/subscriptions/{SUBSCRIPTION}"
NO_ROOM = "Allocation failed. We do not have sufficient capacity for the requested VM size in this region."
_GROUP = "microsoft.resources/resourcegroups"
_SET = "microsoft.compute/virtualmachinescalesets"
_MACHINE = f"{_SET}/virtualmachines"
_ROLE = "microsoft.authorization/roledefinitions"
_GIVEN = "microsoft.authorization/roleassignments"
_LOG = "/providers/microsoft.insights/eventtypes/management/values"
_OUTSIDE = ("microsoft.authorization", "microsoft.resources")
"""Providers whose things are in no resource group."""
_VERSIONS = ("2024-07-01", "2021-04-01")
_PREVIEW = "2099-01-01-preview"
"""Of its API, that Azure knows of all types; roles have one of their own. The stand-in for Pulumi's provider says 1."""
_OF_ROLES = "2022-04-01"
NOT_HEARD_OF = "The specified role definition with ID '{}' does not exist."


class Subscription:
    """``live`` is what ``azure_api.serving`` is given."""

    def __init__(self, made: Callable[[str], object] = lambda _: None) -> None:
        """``made`` is told the id of each thing that is new."""
        self.without: list[str] = []
        """Regions that have no machines to give."""
        self.looks = 0
        """How often one must look until a resource group or a scale set is gone; 0: at once."""
        self.locked: set[str] = set()
        """Ids, in small letters, that somebody has put a lock on: they cannot be deleted."""
        self.unheard_of = 0
        """How often a new role is refused to those who would give it to somebody: Azure has not heard of it everywhere
        (hashicorp/terraform-provider-azurerm #19916)."""
        self._unheard: dict[str, int] = {}
        """How often that was, by role."""
        self._going: dict[str, tuple[str, int]] = {}
        """By the path of an operation: the id of what is to go, and how often one must still look."""
        self._made = made
        self._things: dict[str, Thing] = {}
        """By id in small letters."""
        self._events: list[Thing] = []
        self._numbers: dict[str, int] = {}
        """Of the next machine, by scale set: a set that is made anew begins at 0."""
        self._lock = threading.Lock()

    def live(self, method: str, path: str, sent: Any) -> Any:
        url = urlsplit(path)
        with self._lock:
            version = parse_qs(url.query).get("api-version", [""])[0]
            match method:
                case "PUT":
                    return self._put(url.path, sent)
                case "PATCH":
                    return self._resize(url.path, sent)
                case "DELETE":
                    return _refused_version(url.path, version) or self._end(url.path)
            wanted = {name: value[0] for name, value in parse_qs(url.query).items()}
            return self._get(url.path.lower().rstrip("/"), wanted.get("$filter", ""))

    def of_type(self, kind: str, tag: str = "") -> list[Thing]:
        """Of the cluster ``tag``, if one is named."""
        return [
            one
            for id_, one in list(self._things.items())
            if _type(id_) == kind and (not tag or (one.get("tags") or {}).get("gpuctl:cluster") == tag)
        ]

    def scale_set(self, cluster: str) -> Thing:
        (found,) = self.of_type(_SET, cluster)
        return found

    def machines(self, cluster: str) -> list[str]:
        return [one["name"] for one in self._below(self.scale_set(cluster)["id"], _MACHINE)]

    def take(self, cluster: str, name: str) -> None:
        """A machine, as its end by hand or its eviction does: the set is smaller then."""
        with self._lock:
            scale_set = self.scale_set(cluster)
            (machine,) = [one for one in self._below(scale_set["id"], _MACHINE) if one["name"] == name]
            del self._things[machine["id"].lower()]
            scale_set["sku"]["capacity"] -= 1

    def put(self, path: str, **thing: Any) -> str:
        """By hand. Returns its id."""
        self._things[f"{ROOT}/{path}".lower()] = _thing(f"{ROOT}/{path}", thing)
        return f"{ROOT}/{path}"

    def delete(self, path: str) -> None:
        """By hand, with all that is in it."""
        gone = f"{ROOT}/{path}".lower()
        self._things = {id_: one for id_, one in self._things.items() if id_ != gone and not id_.startswith(f"{gone}/")}

    def paths(self) -> set[str]:
        """Below the subscription, in small letters, of all that is there."""
        return {id_.removeprefix(f"{ROOT}/") for id_ in self._things}

    def may(self, principal: str, scope: str, role: str) -> bool:
        return any(
            given["properties"]["scope"].lower() == scope.lower()
            and given["properties"]["principalId"] == principal
            and given["properties"]["roleDefinitionId"].endswith(role)
            for given in self.of_type(_GIVEN)
        )

    def storage(self, account: str, container: str = "") -> str | None:
        """The id of a storage account, or of a container of it, if there is one."""
        end = f"/storageaccounts/{account}{f'/blobservices/default/containers/{container}' if container else ''}"
        return next((one["id"] for id_, one in list(self._things.items()) if id_.endswith(end)), None)

    # -- to read ------------------------------------------------------------------------------------------------------

    def _get(self, path: str, wanted: str) -> Any:
        if path in self._things:
            return self._things[path]
        if path in self._going:
            return self._look(path)
        if path.startswith(f"{ROOT}/providers/") and len(path.split("/")) == 5:
            return _provider(path.rpartition("/")[2])
        if path.endswith(_LOG):
            return [one for one in self._events if f"resourceUri eq '{one['resourceUri']}'" in wanted]
        if path == f"{ROOT}/resourcegroups":
            return self.of_type(_GROUP)
        if path == f"{ROOT}/resources":
            return [one for id_, one in self._things.items() if _is_listed(id_)]
        if path.startswith(f"{ROOT}/providers/") and len(path.split("/")) == 6:
            return self.of_type(path.removeprefix(f"{ROOT}/providers/"))
        above, _, what = path.rpartition("/")
        if above in self._things and what == "instanceview":
            return {"statuses": []}
        if above in self._things and what == "resources":
            return [one for id_, one in self._things.items() if id_.startswith(f"{above}/") and _is_listed(id_)]
        group, known, kind = path.partition("/providers/")
        if group in self._things and known and kind.count("/") == 1:
            return self._below(group, kind)
        if above in self._things:
            return self._below(above, f"{_type(above)}/{what}")
        account, known, container = path.partition("/blobservices/default/containers")
        if account in self._things and known and not container:
            return self._below(account, "microsoft.storage/storageaccounts/blobservices/containers")
        return self._missing(path)

    def _below(self, id_: str, kind: str) -> list[Thing]:
        within = f"{id_.lower()}/"
        return [one for key, one in list(self._things.items()) if key.startswith(within) and _type(key) == kind]

    def _missing(self, path: str) -> Any:
        group = _group(path)
        if group and f"{ROOT}/resourcegroups/{group}" not in self._things:
            return refusal("ResourceGroupNotFound", f"Resource group '{group}' could not be found.", 404)
        return refusal("ResourceNotFound", f"The Resource '{path}' was not found.", 404)

    # -- to change ----------------------------------------------------------------------------------------------------

    def _put(self, path: str, sent: Thing) -> Any:
        key, kind = path.lower(), _type(path)
        before = self._things.get(key)
        if kind != _GROUP and _group(key) and f"{ROOT}/resourcegroups/{_group(key)}" not in self._things:
            return self._missing(key)
        if refused := self._refused(kind, sent):
            return refused
        self._things[key] = _thing(path, sent)
        if before is None:
            self._made(path)
        return self._resize(path, sent) if kind == _SET else self._things[key]

    def _refused(self, kind: str, sent: Thing) -> Any:
        for id_ in _references(sent):
            if id_.lower() not in self._things and "/roledefinitions/" not in id_.lower():
                return refusal("InvalidResourceReference", f"Resource {id_} was not found.", 400)
        said = sent.get("properties", {})
        if kind == _ROLE and any(one["properties"]["roleName"] == said["roleName"] for one in self.of_type(_ROLE)):
            return refusal("RoleDefinitionWithSameNameExists", "A custom role with the same name exists.", 409)
        if kind == _GIVEN:
            role = said["roleDefinitionId"].rpartition("/")[2]
            if any(one["name"] == role for one in self.of_type(_ROLE)) and self._unheard.get(role, 0) < self.unheard_of:
                self._unheard[role] = self._unheard.get(role, 0) + 1
                return refusal("RoleDefinitionDoesNotExist", NOT_HEARD_OF.format(role), 404)
            if said["scope"].lower() not in self._things:
                return self._missing(said["scope"])
            if self.may(said["principalId"], said["scope"], said["roleDefinitionId"].rpartition("/")[2]):
                return refusal("RoleAssignmentExists", "The role assignment already exists.", 409)
            is_so = "User" if said["principalId"] == USER else "ServicePrincipal"
            if said.get("principalType", is_so) != is_so:
                told = f"The PrincipalId '{said['principalId']}' has type '{is_so}', which is different from specified"
                return refusal("UnmatchedPrincipalType", f"{told} PrincipalType '{said['principalType']}'.", 400)
        return None

    def _end(self, path: str) -> Any:
        """At once, or begun: Azure tells of a group by ``Location``, of a scale set by ``Azure-AsyncOperation``."""
        key = path.lower()
        if key not in self._things or not self.looks or _type(key) not in (_GROUP, _SET):
            return self._delete(path)
        if any(id_ == key for id_, _ in self._going.values()):
            return refusal("AnotherOperationInProgress", "Another operation is in progress.", 409)
        if refused := self._stands(key):
            return refused
        self._things[key]["properties"]["provisioningState"] = "Deleting"
        operation = f"{ROOT}/operations/{len(self._going)}"
        self._going[operation] = key, self.looks
        header = "Location" if _type(key) == _GROUP else "Azure-AsyncOperation"
        return [202, {}, {header: f"$URL{operation}?api-version=1"}]

    def _look(self, operation: str) -> Any:
        key, looks = self._going[operation]
        by_status = _type(key) == _SET
        if looks > 1:
            self._going[operation] = key, looks - 1
            return {"status": "InProgress"} if by_status else [202, {}]
        self._delete(key)
        return {"status": "Succeeded"} if by_status else [200, {}]

    def _stands(self, key: str) -> Any:
        """Why it cannot go."""
        below = [id_ for id_ in self._things if id_ == key or id_.startswith(f"{key}/")]
        if self.locked & set(below) or any(key.startswith(f"{id_}/") for id_ in self.locked):
            return refusal("ScopeLocked", "The scope cannot perform delete operation because it is locked.", 409)
        name = self._things[key]["name"]
        has = [one for one in self.of_type(_GIVEN) if one["properties"]["roleDefinitionId"].endswith(f"/{name}")]
        if _type(key) == _ROLE and has:
            told = "There are existing role assignments referencing role"
            return refusal("RoleDefinitionHasAssignments", f"{told} (code: RoleDefinitionHasAssignments).", 400)
        return None

    def _delete(self, path: str) -> Any:
        key = path.lower()
        if key not in self._things:
            return [204, ""]
        if refused := self._stands(key):
            return refused
        gone = [id_ for id_ in self._things if id_ == key or id_.startswith(f"{key}/")]
        used = {id_.lower() for other, one in self._things.items() if other not in gone for id_ in _references(one)}
        if _type(key) != _GROUP and used & set(gone):
            name = self._things[key]["name"]
            return refusal("ResourceInUse", f"{name} is in use and cannot be deleted.", 400)
        for id_ in gone:
            del self._things[id_]
            self._numbers.pop(id_, None)
        return [200, {}]

    def _resize(self, path: str, sent: Thing) -> Any:
        key = path.lower()
        scale_set = self._things.get(key)
        if scale_set is None:
            return self._missing(key)
        wanted = scale_set["sku"]["capacity"] = int(sent["sku"]["capacity"])
        there = self._below(path, _MACHINE)
        for machine in there[wanted:]:
            del self._things[machine["id"].lower()]
        if len(there) < wanted and scale_set["location"] in self.without:
            self._events.append(_failed(scale_set["id"]))
            return scale_set
        for _ in range(wanted - len(there)):
            number = self._numbers[key] = self._numbers.get(key, -1) + 1
            machine = {**_MACHINE_THAT_RUNS, "instanceId": str(number), "location": scale_set["location"]}
            id_ = f"{scale_set['id']}/virtualMachines/{number}"
            self._things[id_.lower()] = {**machine, "id": id_, "name": f"{scale_set['name']}_{number}"}
        return scale_set


_MACHINE_THAT_RUNS: Thing = {
    "properties": {
        "provisioningState": "Succeeded",
        "instanceView": {"statuses": [{"code": "PowerState/running", "level": "Info", "displayStatus": "VM running"}]},
    }
}


def _provider(namespace: str) -> Thing:
    """What types it has, and in which versions: no list of this subscription's own is complete."""
    kinds = ["virtualMachineScaleSets", "virtualMachineScaleSets/virtualMachines", "disks", "snapshots"]
    kinds += ["virtualNetworks", "networkSecurityGroups", "publicIPAddresses", "natGateways", "networkInterfaces"]
    kinds += ["userAssignedIdentities", "storageAccounts", "bastionHosts", "vaults"]
    versions = [_PREVIEW, *_VERSIONS]
    return {"namespace": namespace, "resourceTypes": [{"resourceType": one, "apiVersions": versions} for one in kinds]}


def _refused_version(path: str, version: str) -> Any:
    known = (_OF_ROLES,) if _type(path).startswith("microsoft.authorization/") else _VERSIONS
    if version in ("", "1", *known):  # the tests' own word has none
        return None
    told = f"No registered resource provider found for API version '{version}' and type '{_type(path)}'."
    return refusal("NoRegisteredProviderFound", told, 400)


def _failed(id_: str) -> Thing:
    error = {"code": "AllocationFailed", "message": NO_ROOM}
    return {
        "eventTimestamp": datetime.now(UTC).isoformat(),
        "resourceUri": id_,
        "status": {"value": "Failed"},
        "properties": {
            "statusMessage": json.dumps({"error": {"code": "ResourceOperationFailure", "details": [error]}})
        },
    }


def _thing(path: str, sent: Thing) -> Thing:
    properties = {"provisioningState": "Succeeded", **sent.get("properties", {})}
    return {
        **copy.deepcopy(sent),
        "id": path,
        "name": path.rpartition("/")[2],
        "type": _type(path),
        "properties": properties,
    }


def _type(path: str) -> str:
    """In small letters, as the resource manager has it."""
    _, known, tail = path.lower().rpartition("/providers/")
    if not known:
        return _GROUP
    provider, *pairs = tail.split("/")
    return "/".join([provider, *pairs[::2]])


def _group(path: str) -> str:
    parts = path.lower().split("/")
    return parts[4] if len(parts) > 4 and parts[3] == "resourcegroups" else ""


def _is_listed(id_: str) -> bool:
    """Whether the resource manager lists it: no groups, no roles, no parts of other things."""
    kind = _type(id_)
    return kind.partition("/")[0] not in _OUTSIDE and kind.count("/") == 1


def _references(thing: Any) -> Iterator[str]:
    """Ids of other things in what somebody has put."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            if key not in ("id", "scope", "assignableScopes") or (key == "id" and "name" not in thing):
                yield from _references([key, value])
    elif isinstance(thing, list):
        for value in thing:
            yield from _references(value)
    elif isinstance(thing, str) and thing.lower().startswith(f"{ROOT}/"):
        yield thing
