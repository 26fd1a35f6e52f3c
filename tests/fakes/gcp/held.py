"""What a project of Google Cloud holds: things that are made, listed and taken away by requests, as Compute Engine, IAM
and Resource Manager have them, and groups whose machines come when they are asked for.

A thing that another one names is not deleted, nor is a template that machines of a group were made from: they would be
made again from it. To delete takes an operation, which is done at once unless a test wants otherwise (``Operations``).
A machine that is deleted and not its group comes again. A tag's failures are told in its operation alone, and a value
stays bound for a while to a group that is gone: github.com/ubicloud/ubicloud, pull request 6325.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from tests.fakes.gcp.api import PROJECT, URL, ZONES, Asked, Google, refusal, status_refusal
from tests.fakes.gcp.operations import Operations

Thing = dict[str, Any]
Answer = tuple[int, Any]

OF_ALL = f"projects/{PROJECT}"
_PATH = re.compile(r"/(?:compute/v1|v1|v3)/(.+)")
_COLLECTIONS = (
    *("networks", "subnetworks", "firewalls", "instanceTemplates", "resourcePolicies", "instanceGroupManagers"),
    *("instances", "disks", "addresses", "forwardingRules", "routers"),
    *("serviceAccounts", "roles", "tagKeys", "tagValues"),
)
_LISTED_AS = {"serviceAccounts": "accounts", "roles": "roles", "tagKeys": "tagKeys", "tagValues": "tagValues"}
"""All others as ``items``."""
_DONE = {"name": "operation-1", "status": "DONE", "done": True}


class Held:
    """``things`` by their id, such as ``projects/a-project/global/networks/n`` or ``tagKeys/1``."""

    def __init__(self, google: Google) -> None:
        self.things: dict[str, Thing] = {}
        self.without: list[str] = []
        """Zones that give no machines."""
        self.policy: Thing = {"version": 3, "etag": "0", "bindings": []}
        self.operations = Operations()
        self.ghosts = 0
        """Times that a tag's value is still bound to something deleted, when somebody wants to delete it."""
        self._groups: dict[str, str] = {}
        """Of machines, by id."""
        self._errors: dict[str, list[Thing]] = {}
        """Of groups, by id."""
        self._numbers = iter(range(1, 1_000_000))
        self._lock = threading.RLock()
        self._verbs: dict[str, Callable[[str, Asked], Answer]] = {
            "resize": lambda group, one: self.resize(group, int(one.query["size"])),
            "listManagedInstances": self._managed,
            "listErrors": lambda group, _: (200, {"items": self._errors.get(group, [])}),
        }
        google.held = self.answer

    def answer(self, one: Asked) -> Answer | None:
        """``None``: it is asked for something else."""
        found = _PATH.fullmatch(one.path)
        if found is None:
            return None
        with self._lock:
            return self._of_policy(one) or self._of_things(one, found[1])

    def of(self, collection: str) -> Iterator[Thing]:
        return (thing for id_, thing in list(self.things.items()) if id_.split("/")[-2] == collection)

    def add(self, id_: str, thing: Thing) -> None:
        """With a name of its own, if it has none."""
        name = id_.rpartition("/")[2]
        self.things[id_] = {"name": name, "selfLink": f"{URL.removesuffix(OF_ALL)}{id_}", **thing}

    def resize(self, group: str, size: int) -> Answer:
        """Machines beyond ``size`` go, the newest first; those that are missing come, where the zone has any."""
        with self._lock:
            self.things[group]["targetSize"] = size
            for machine in self._machines(group)[size:]:
                self._end(machine)
            self._fill(group)
        return 200, _DONE

    def delete(self, id_: str) -> Answer:
        """At once, whatever operations take."""
        collection = id_.split("/")[-2]
        if collection == "roles":
            if self.things[id_].get("deleted"):
                return status_refusal(400, f"You can't delete {id_}: it is deleted already.", "FAILED_PRECONDITION")
            self.things[id_]["deleted"] = True  # its id is free a month later
            return 200, self.things[id_]
        if user := self._user(id_):
            if collection.startswith("tag"):
                return status_refusal(400, f"Cannot delete {id_}: it is in use by {user}", "FAILED_PRECONDITION")
            said = f"The {collection} resource '{id_}' is already being used by '{user}'"
            return refusal(400, said, "resourceInUseByAnotherResource")
        if collection == "tagValues" and self.ghosts:
            self.ghosts -= 1
            said = f"Cannot delete tag value, {id_}, because it is still attached to resources in 'global' region."
            return status_refusal(400, said, "FAILED_PRECONDITION")
        for machine in self._machines(id_):
            self._end(machine)
        if group := self._groups.get(id_):
            self._end(id_)
            self._fill(group)
        else:
            del self.things[id_]
        if collection == "serviceAccounts":
            self._forget(id_.rpartition("/")[2])
            return 200, {}
        return 200, _DONE

    def undeleted(self, role: str) -> Answer:
        """As it can be within a week."""
        self.things[role].pop("deleted")
        return 200, self.things[role]

    # -- things -------------------------------------------------------------------------------------------------------

    def _of_things(self, one: Asked, path: str) -> Answer | None:
        if (told := self.operations.answer(path)) is not None:
            return told
        parent, _, last = path.rpartition("/")
        if parent.endswith("/aggregated") and last in _COLLECTIONS:
            return 200, {"items": self._by_place(last)}
        if last in _COLLECTIONS:
            return self._make(path, one.body) if one.method == "POST" else self._list(path, one.query)
        id_, _, verb = path.partition(":")
        if verb == "undelete" and id_ in self.things:
            return self.undeleted(id_)
        if parent in self.things and last in self._verbs:
            return self._verbs[last](parent, one)
        if path not in self.things:
            return None
        match one.method:
            case "GET":
                return 200, self.things[path]
            case "PATCH":
                return self._patch(path, one.body)
        return self._delete(path)

    def _delete(self, id_: str) -> Answer:
        """As Google does: it answers that it has begun, and a thing in use is refused before that. Tags never are."""
        if id_.startswith("tag"):
            return self.operations.begin("operations/rctv", lambda: self.delete(id_))
        place, collection, _ = id_.rsplit("/", 2)
        if collection in ("serviceAccounts", "roles") or self._user(id_):
            return self.delete(id_)
        return self.operations.begin(f"{place}/operations/operation", lambda: self.delete(id_))

    def _make(self, collection: str, body: Thing) -> Answer:
        match collection.rpartition("/")[2]:
            case "serviceAccounts":
                email = f"{body['accountId']}@{PROJECT}.iam.gserviceaccount.com"
                id_, thing = f"{collection}/{email}", {**body["serviceAccount"], "email": email}
            case "roles":
                id_ = f"{collection}/{body['roleId']}"
                thing = {**body["role"], "name": id_}
            case "tagKeys" | "tagValues":
                id_ = f"{collection}/{next(self._numbers)}"
                thing = {**body, "name": id_}
            case _:
                id_, thing = f"{collection}/{body['name']}", body
        if self.things.get(id_, {}).get("deleted"):
            words = "where there is an existing role with that role_id in a deleted state"
            return refusal(
                400, f"You can't create a role with role_id ({body['roleId']}) {words}.", "failedPrecondition"
            )
        if id_ in self.things or self._is_second_key(thing, collection):
            return refusal(409, f"The resource '{id_}' already exists", "alreadyExists")
        self.add(id_, thing)
        return 200, {**_DONE, "response": self.things[id_], "id": id_}

    def _patch(self, id_: str, body: Thing) -> Answer:
        """Machines that run go on, unless their group is to bring them to its new template by itself."""
        if "/instanceTemplates/" in id_:
            return refusal(405, "An instance template cannot be changed", "methodNotAllowed")
        self.things[id_].update(body)
        if "versions" in body and self.things[id_]["updatePolicy"]["type"] == "PROACTIVE":
            for machine in self._machines(id_):
                self._end(machine)
            self._fill(id_)
        return 200, _DONE

    def _is_second_key(self, thing: Thing, collection: str) -> bool:
        same = (thing.get("parent"), thing.get("shortName"))
        return collection.startswith("tag") and any(
            (one.get("parent"), one.get("shortName")) == same for one in self.of(collection)
        )

    def _list(self, collection: str, query: dict[str, str]) -> Answer:
        there = [thing for id_, thing in self.things.items() if id_.rpartition("/")[0] == collection]
        there = [one for one in there if one.get("parent") == query.get("parent") and not one.get("deleted")]
        return 200, {_LISTED_AS.get(collection.rpartition("/")[2], "items"): there}

    def _by_place(self, collection: str) -> Thing:
        places: Thing = {f"zones/{ZONES[-1]}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
        for id_, thing in self.things.items():
            place, kind, _ = id_.removeprefix(f"{OF_ALL}/").rsplit("/", 2) if id_.count("/") > 3 else ("", "", "")
            if kind == collection:
                places.setdefault(place, {}).pop("warning", None)
                places[place].setdefault(collection, []).append(thing)
        return places

    def _user(self, id_: str) -> str:
        """A thing that names this one. A template is only a text, until a group has it."""
        named = re.compile(rf'["/]{re.escape(id_)}"')
        for user in self.things[id_].get("users", ()):
            if str(user).removeprefix(URL.removesuffix(OF_ALL)) in self.things:
                return str(user)
        return next(
            (
                other
                for other, thing in self.things.items()
                if other != id_
                and "/instanceTemplates/" not in other
                and named.search(json.dumps({**thing, "users": []}))
            ),
            "",
        )

    # -- machines -----------------------------------------------------------------------------------------------------

    def _machines(self, group: str) -> list[str]:
        return [id_ for id_, of in self._groups.items() if of == group]

    def _fill(self, group: str) -> None:
        there, zone = self.things[group], group.split("/")[3]
        for _ in range(int(there["targetSize"]) - len(self._machines(group))):
            if zone in self.without:
                self._errors.setdefault(group, []).insert(0, _exhausted(zone))
                return
            self._begin(group, zone, f"{there['baseInstanceName']}-{next(self._numbers):04}")

    def _begin(self, group: str, zone: str, name: str) -> None:
        template = str(self.things[group]["versions"][0]["instanceTemplate"]).removeprefix(URL.removesuffix(OF_ALL))
        made = self.things[template]["properties"]
        instance = f"{OF_ALL}/zones/{zone}/instances/{name}"
        origin = {"items": [{"key": "instance-template", "value": template}]}
        self.add(instance, {**made, "status": "RUNNING", "metadata": origin})
        self._groups[instance] = group
        disk = {"labels": made["labels"], "users": [f"{URL.removesuffix(OF_ALL)}{instance}"]}
        self.add(f"{OF_ALL}/zones/{zone}/disks/{name}", {**disk, "sizeGb": "200", "type": "x/pd-balanced"})

    def _end(self, machine: str) -> None:
        del self.things[machine], self.things[machine.replace("/instances/", "/disks/")], self._groups[machine]

    def _managed(self, group: str, _: Asked) -> Answer:
        """The group makes up for what was lost."""
        self._fill(group)
        there = [
            {"instance": self.things[id_]["selfLink"], "instanceStatus": "RUNNING", "currentAction": "NONE"}
            for id_ in self._machines(group)
        ]
        return 200, {"managedInstances": there}

    # -- rights -------------------------------------------------------------------------------------------------------

    def _of_policy(self, one: Asked) -> Answer | None:
        match one.path.removeprefix(f"/v1/{OF_ALL}:"):
            case "getIamPolicy":
                return 200, self.policy
            case "setIamPolicy":
                return self._set_policy(one.body["policy"])
            case "testIamPermissions":
                return 200, one.body
        return None

    def _set_policy(self, policy: Thing) -> Answer:
        if policy.get("etag", self.policy["etag"]) != self.policy["etag"]:
            return status_refusal(409, "There were concurrent policy changes. Please retry.", "ABORTED")
        if policy.get("version") != 3 and any("condition" in one for one in policy["bindings"]):
            return status_refusal(400, "Conditions need policy version 3", "INVALID_ARGUMENT")
        there = {str(one["email"]) for one in self.of("serviceAccounts")}
        members = {member for one in policy["bindings"] for member in one["members"]}
        for member in members:
            kind, _, email = member.partition(":")
            if kind == "serviceAccount" and email not in there:
                return status_refusal(400, f"Service account {email} does not exist.", "INVALID_ARGUMENT")
        self.policy = {**policy, "etag": str(int(self.policy["etag"]) + 1)}
        return 200, self.policy

    def _forget(self, email: str) -> None:
        """What a policy makes of an account that is gone."""
        gone = {f"serviceAccount:{email}": f"deleted:serviceAccount:{email}?uid=1"}
        for binding in self.policy["bindings"]:
            binding["members"] = [gone.get(one, one) for one in binding["members"]]


def _exhausted(zone: str) -> Thing:
    place = f"The zone '{OF_ALL}/zones/{zone}'"
    message = f"{place} does not have enough resources available to fulfill the request."
    error = {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": message}
    return {"error": error, "timestamp": datetime.now(UTC).isoformat()}
