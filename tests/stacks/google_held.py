"""What a project of Google Cloud holds: things that are made, listed and taken away by requests, as Compute Engine, IAM
and Resource Manager have them, and groups whose machines come when they are asked for.

A thing that another one names is not deleted, nor is a template that machines of a group were made from: they would be
made again from it. Operations are done at once.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from tests.stacks.google import PROJECT, URL, ZONES, Asked, Google, refusal

Thing = dict[str, Any]
Answer = tuple[int, Any]

OF_ALL = f"projects/{PROJECT}"
_PATH = re.compile(r"/(?:compute/v1|v1|v3)/(.+)")
_COLLECTIONS = (
    *("networks", "subnetworks", "firewalls", "instanceTemplates", "resourcePolicies", "instanceGroupManagers"),
    *("instances", "disks", "serviceAccounts", "roles", "tagKeys", "tagValues"),
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
        self.policy: Thing = {"version": 3, "bindings": []}
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
        collection = id_.split("/")[-2]
        if collection == "roles":
            self.things[id_]["deleted"] = True  # its id is free a month later
            return 200, self.things[id_]
        if user := self._user(id_):
            said = f"The {collection} resource '{id_}' is already being used by '{user}'"
            return refusal(400, said, "resourceInUseByAnotherResource")
        for machine in self._machines(id_):
            self._end(machine)
        del self.things[id_]
        return 200, _DONE

    def undeleted(self, role: str) -> Answer:
        """As it can be within a week."""
        self.things[role].pop("deleted")
        return 200, self.things[role]

    # -- things -------------------------------------------------------------------------------------------------------

    def _of_things(self, one: Asked, path: str) -> Answer | None:
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
        return self.delete(path)

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
        return next(
            (
                other
                for other, thing in self.things.items()
                if other != id_ and "/instanceTemplates/" not in other and named.search(json.dumps(thing))
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
                self.policy = one.body["policy"]
                return 200, self.policy
            case "testIamPermissions":
                return 200, one.body
        return None


def _exhausted(zone: str) -> Thing:
    place = f"The zone '{OF_ALL}/zones/{zone}'"
    message = f"{place} does not have enough resources available to fulfill the request."
    error = {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": message}
    return {"error": error, "timestamp": datetime.now(UTC).isoformat()}
