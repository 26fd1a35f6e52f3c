"""Buckets of a project of Google Cloud, as Cloud Storage's JSON API has them: listed, emptied, deleted, and who may use
them. A bucket with anything in it, an older version too, is not deleted.

Source: cloud.google.com/storage/docs/json_api/v1, "Buckets" and "Objects".
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.fakes.gcp.api import Asked, Google, refusal
from tests.fakes.stores import gcs

Answer = tuple[int, Any]
_PATH = re.compile(r"/storage/v1/b(?:/([^/]+)(?:/(o|iam)(?:/(.+))?)?)?")


@dataclass
class Held:
    """One bucket."""

    shown: dict[str, Any]
    objects: list[tuple[str, int]] = field(default_factory=list)
    """Names and generations: all that there are, those that are not current among them."""
    current: set[tuple[str, int]] = field(default_factory=set)
    retained: set[str] = field(default_factory=set)
    """Names of those that a policy keeps."""
    granted: set[str] = field(default_factory=lambda: {"storage.buckets.setIamPolicy"})
    """Permissions of whoever asks."""
    policy: dict[str, Any] = field(default_factory=lambda: {"version": 3, "etag": "0", "bindings": []})

    def bind(self, role: str, member: str) -> None:
        self.policy["bindings"].append({"role": role, "members": [member]})

    def write(self, name: str, generation: int = 1, *, current: bool = True) -> None:
        self.objects.append((name, generation))
        if current:
            self.current.add((name, generation))


class Buckets:
    """``things`` by name. What is asked of other services is asked of who held things before."""

    def __init__(self, google: Google, things: dict[str, Held] | None = None) -> None:
        self.things = things if things is not None else {}
        self.page = 3
        """Objects of a page of a list."""
        before = google.held
        google.held = lambda one: self.answer(one) or before(one)

    def add(self, name: str, location: str = "US-CENTRAL1", labels: dict[str, str] | None = None) -> Held:
        shown = {"name": name, "location": location, **({"labels": labels} if labels else {})}
        self.things[name] = Held(shown)
        return self.things[name]

    def answer(self, one: Asked) -> Answer | None:
        found = _PATH.fullmatch(one.path)
        if found is None:
            return None
        name, part, key = found.groups()
        if name is None:
            return 200, {"items": [bucket.shown for bucket in self.things.values()]}
        if name not in self.things:
            return refusal(404, "The specified bucket does not exist.", "notFound")
        bucket = self.things[name]
        match part, key, one.method:
            case "iam", None, "GET":
                return 200, bucket.policy
            case "iam", "testPermissions", "GET":
                wanted = one.query["permissions"]
                return 200, {"permissions": [wanted] if wanted in bucket.granted else []}
            case "iam", None, "PUT":
                return self._set_policy(bucket, one.body)
            case "o", None, "GET":
                return 200, self._list(bucket, one.query)
            case "o", key, "DELETE" if key:
                return self._delete(bucket, unquote(key), one.query)
            case None, None, "GET":
                return 200, bucket.shown
            case None, None, "DELETE":
                return self._remove(name)
        return None

    def _set_policy(self, bucket: Held, policy: dict[str, Any]) -> Answer:
        if policy.get("etag", bucket.policy["etag"]) != bucket.policy["etag"]:
            return refusal(412, "At least one of the pre-conditions you specified did not hold.", "conditionNotMet")
        bucket.policy = {**policy, "etag": str(int(bucket.policy["etag"]) + 1)}
        return 200, bucket.policy

    def _list(self, bucket: Held, query: dict[str, str]) -> dict[str, Any]:
        there = sorted(bucket.objects if query.get("versions") == "true" else bucket.current)
        first = int(query.get("pageToken", "0"))
        shown = [{"name": name, "generation": str(number)} for name, number in there[first : first + self.page]]
        more = {"nextPageToken": str(first + self.page)} if first + self.page < len(there) else {}
        return {"kind": "storage#objects", **({"items": shown} if shown else {}), **more}

    def _delete(self, bucket: Held, name: str, query: dict[str, str]) -> Answer:
        if "generation" not in query:
            return refusal(400, "without a generation a version of it would stay", "invalid")
        one = (name, int(query["generation"]))
        if one not in bucket.objects:
            return refusal(404, f"No such object: {name}", "notFound")
        if name in bucket.retained:
            said = f"Object '{name}' is subject to bucket's retention policy and cannot be deleted"
            return refusal(403, said, "retentionPolicyNotMet")
        bucket.objects.remove(one)
        bucket.current.discard(one)
        return 204, {}

    def _remove(self, name: str) -> Answer:
        if self.things[name].objects:
            return refusal(409, "The bucket you tried to delete is not empty.", "conflict")
        del self.things[name]
        return 204, {}


class Stored(Buckets):
    """Buckets that are made by requests too, with what is written into them on our own server (``stores.gcs``) at
    ``endpoint``. It keeps no older versions."""

    def __init__(self, google: Google, endpoint: str) -> None:
        super().__init__(google)
        self._endpoint = endpoint
        self._lock = threading.Lock()

    def answer(self, one: Asked) -> Answer | None:
        found = _PATH.fullmatch(one.path)
        if found is None:
            return None
        with self._lock:
            if one.method == "POST" and found[1] is None:
                return self._make(one.body)
            if there := self.things.get(found[1] or ""):
                there.objects = list(gcs.generations(self._endpoint, found[1]).items())
                there.current = set(there.objects)
            return super().answer(one)

    def _make(self, body: dict[str, Any]) -> Answer:
        if body["name"] in self.things:
            said = "Your previous request to create the named bucket succeeded and you already own it."
            return refusal(409, said, "conflict")
        gcs.create(self._endpoint, body["name"])
        return 200, self.add(**body).shown

    def _delete(self, bucket: Held, name: str, query: dict[str, str]) -> Answer:
        status, answer = super()._delete(bucket, name, query)
        if status == 204:
            gcs.delete(self._endpoint, bucket.shown["name"], name)
        return status, answer

    def _remove(self, name: str) -> Answer:
        status, answer = super()._remove(name)
        if status == 204:
            gcs.delete(self._endpoint, name)
        return status, answer
