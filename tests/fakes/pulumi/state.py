"""State of the stand-in for Pulumi's CLI, where and as the real one keeps it in a backend without a server.

::

    <backend>/.pulumi/stacks/gpuctl/<stack>.json                      resources, and operations that were begun
    <backend>/.pulumi/locks/organization/gpuctl/<stack>/<id>.json     whoever is changing them
    <project>/Pulumi.<stack>.yaml                                     what tells whether a passphrase is the right one

Texts are those of ``pkg/backend/diy`` and ``pkg/secrets/passphrase`` of pulumi/pulumi.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import pwd
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

Record = dict[str, Any]

PROJECT = "gpuctl"


class CliError(Exception):
    """What the CLI fails with."""


class Place:
    """Of one stack in its backend."""

    def __init__(self, stack: str) -> None:
        self.stack = stack
        self.url = os.environ["PULUMI_BACKEND_URL"]
        folder = _folder(self.url) / ".pulumi"
        self._locks = folder / "locks" / "organization" / PROJECT / stack
        self.path = folder / "stacks" / PROJECT / f"{stack}.json"

    def exists(self) -> bool:
        return self.path.exists()

    def create(self) -> None:
        if self.exists():
            raise CliError(f"stack 'organization/{PROJECT}/{self.stack}' already exists")
        check_passphrase(self.stack)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write({"manifest": _manifest()})

    def remove(self) -> None:
        """What was there last is kept beside it."""
        with self.locked():
            left = [one for one in self.read().get("resources", []) if one["type"] != "pulumi:pulumi:Stack"]
            if left:
                raise CliError(
                    f"'{self.stack}' still has resources; removal rejected. Possible actions:\n"
                    f"- Make sure that '{self.stack}' is the stack that you want to destroy\n"
                    "- Run `pulumi destroy` to delete the resources, then run `pulumi stack rm`\n"
                    "- Run `pulumi stack rm --force` to override this error"
                )
            self.path.rename(f"{self.path}.bak")
        _settings(self.stack).unlink(missing_ok=True)

    def read(self) -> Record:
        """The deployment. Raises ``CliError`` if it cannot be read."""
        try:
            found: Record = json.loads(self.path.read_bytes())["checkpoint"]["latest"]
        except ValueError as error:
            why = "unexpected end of JSON input" if _is_cut_short(error) else f"invalid character: {error}"
            raise CliError(f"failed to load checkpoint: place 1: {why}") from error
        return found

    def write(self, deployment: Record) -> None:
        """At once, or not at all."""
        checkpoint = {"stack": f"organization/{PROJECT}/{self.stack}", "latest": deployment}
        new = Path(f"{self.path}.{uuid.uuid4().hex}")
        new.write_text(json.dumps({"version": 3, "checkpoint": checkpoint}))
        new.replace(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Who is killed in it leaves the lock."""
        self._refuse_others(None)
        own = self._locks / f"{uuid.uuid4()}.json"
        own.parent.mkdir(parents=True, exist_ok=True)
        holder = {"pid": os.getpid(), "username": pwd.getpwuid(os.getuid()).pw_name, "hostname": platform.node()}
        own.write_text(json.dumps({**holder, "timestamp": datetime.now(UTC).isoformat()}))
        try:
            self._refuse_others(own)
            yield
        finally:
            own.unlink(missing_ok=True)

    def cancel(self) -> None:
        """All that this does without a server: whoever holds the lock is not told."""
        for lock in self._lock_files():
            lock.unlink(missing_ok=True)

    def _refuse_others(self, own: Path | None) -> None:
        others = [lock for lock in self._lock_files() if lock != own]
        if not others:
            return
        told = [self._told(lock) for lock in others]
        raise CliError(
            f"the stack is currently locked by {len(others)} lock(s). Either wait for the other process(es) to end or"
            " delete the lock file with `pulumi cancel`." + "".join(told)
        )

    def _told(self, lock: Path) -> str:
        held = json.loads(lock.read_bytes())
        since = datetime.fromisoformat(held["timestamp"]).strftime("%Y-%m-%dT%H:%M:%SZ")
        where = f"{self.url}/.pulumi/locks/organization/{PROJECT}/{self.stack}/{lock.name}"
        return f"\n  {where}: created by {held['username']}@{held['hostname']} (pid {held['pid']}) at {since}"

    def _lock_files(self) -> list[Path]:
        return sorted(self._locks.glob("*.json"))


class State:
    """Of one stack, while it is changed: every step of it is written down before the next one. Safe for threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._writing = threading.RLock()
        self._closed = False
        told = place.read()
        self._new: list[Record] = []
        """What this change has come to, in that order: nothing needs what comes after it."""
        self._old: list[Record] = told.get("resources") or []
        self.interrupted: list[Record] = told.get("pending_operations") or []
        """By somebody before."""
        # What became of something that was being made only a person can know (``pkg/backend/snapshot.go``).
        self._left = [one for one in self.interrupted if one["type"] == "creating"]
        self._begun: list[Record] = []

    @property
    def resources(self) -> list[Record]:
        """What was replaced, and is to go, has ``delete``."""
        return [*self._new, *self._old]

    def find(self, urn: str) -> Record | None:
        return next((one for one in self.resources if one["urn"] == urn and not one.get("delete")), None)

    @contextmanager
    def operation(self, kind: str, resource: Record) -> Iterator[None]:
        """``creating``, ``updating`` or ``deleting``: over when the context is, however it ends, unless this process
        does."""
        begun = {"resource": dict(resource), "type": kind}
        with self._writing:
            self._begun.append(begun)
            self.save()
        try:
            yield
        finally:
            with self._writing:
                self._begun.remove(begun)
                self.save()

    def put(self, resource: Record) -> None:
        """In place of what was there of this URN."""
        with self._writing:
            there = self.find(resource["urn"])
            self._new = [one for one in self._new if one is not there]
            self._old = [one for one in self._old if one is not there]
            self._new.append(resource)
            self.save()

    def replace(self, old: Record, new: Record) -> None:
        """``old`` is to go, but not yet."""
        with self._writing:
            old["delete"] = True
            self._new.append(new)
            self.save()

    def drop(self, resource: Record) -> None:
        with self._writing:
            self._new = [one for one in self._new if one is not resource]
            self._old = [one for one in self._old if one is not resource]
            self.save()

    def clear_pending_creates(self) -> None:
        with self._writing:
            self._left = []
            self.save()

    def close(self) -> None:
        """Whatever happens from now on is not written down."""
        with self._writing:
            self._closed = True

    def save(self) -> None:
        with self._writing:
            if self._closed:
                return
            secrets = {"type": "passphrase", "state": {"salt": _salt(self._place.stack)}}
            found: Record = {"manifest": _manifest(), "secrets_providers": secrets, "resources": self.resources}
            if pending := [*self._begun, *self._left]:
                found["pending_operations"] = pending
            self._place.write(found)


def check_passphrase(stack: str) -> None:
    """Against what the first one has left in the project's settings of the stack. Raises ``CliError``.

    Verbs that only read do not ask for it: the state holds no secret."""
    phrase = os.environ.get("PULUMI_CONFIG_PASSPHRASE")
    if phrase is None:
        raise CliError(
            "getting stack configuration: get stack secrets manager: passphrase must be set with"
            " PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE environment variables"
        )
    salt = _salt(stack)
    if not salt:
        path = _settings(stack)
        before = path.read_text() if path.exists() else ""
        path.write_text(f"encryptionsalt: {_salted(phrase, os.urandom(8))}\n{before}")
    elif salt != _salted(phrase, base64.b64decode(salt.split(":")[1])):
        raise CliError("getting stack configuration: get stack secrets manager: incorrect passphrase")


def _salt(stack: str) -> str:
    path = _settings(stack)
    found = re.search(r"^encryptionsalt: (\S+)$", path.read_text(), re.M) if path.exists() else None
    return found[1] if found else ""


def _salted(phrase: str, salt: bytes) -> str:
    key = hashlib.pbkdf2_hmac("sha256", phrase.encode(), salt, 1000)
    return f"v1:{base64.b64encode(salt).decode()}:v1:{base64.b64encode(key).decode()}"


def _settings(stack: str) -> Path:
    return Path.cwd() / f"Pulumi.{stack}.yaml"


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "file":  # the tests share no other one
        home = Path(os.environ.get("PULUMI_HOME") or Path.home() / ".pulumi")
        return home / "elsewhere" / quote(url, safe="")
    folder = Path(parts.path)
    if not folder.is_dir():
        raise CliError(f"unable to open bucket {url}: stat {folder}: no such file or directory")
    return folder


def _manifest() -> Record:
    return {"time": datetime.now(UTC).isoformat(), "magic": "", "version": "v3.200.0"}


def _is_cut_short(error: ValueError) -> bool:
    """As Go's decoder tells it."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())
