"""A program that stands in for Pulumi's CLI: it runs the inline program for real and makes what it declares on a server
that stands in for the cloud, as far as the rest of gpuctl asks for it there (``made_aws``).

Its state is one JSON file. It keeps what is ``retain_on_delete``, deletes in turn, last first, and leaves what it must
not know of (machines) to the group.
"""

from __future__ import annotations

import contextlib
import json
import stat
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def install(folder: Path) -> Path:
    """A folder for PATH with ``pulumi`` in it."""
    folder.mkdir(exist_ok=True)
    program = folder / "pulumi"
    root = Path(__file__).resolve().parents[2]
    program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m tests.stacks.pulumi_cli "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


class State:
    """``state.json`` of the folder that the CLI works in: another is in the backend, which the tests do not share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        told: Record = json.loads(path.read_text()) if path.exists() else {}
        self.there: bool = told.get("there", False)
        self.resources: list[Record] = told.get("resources", [])
        self.replaced: list[Record] = told.get("replaced", [])
        """What others have come for, and what is to go."""
        self.outputs: Record = told.get("outputs", {})

    def find(self, kind: str, name: str) -> Record | None:
        return next((one for one in self.resources if (one["type"], one["name"]) == (kind, name)), None)

    def add(self, one: Record) -> None:
        self.resources.append(one)
        self.save()

    def save(self) -> None:
        keys = ("there", "resources", "replaced", "outputs")
        self._path.write_text(json.dumps({key: getattr(self, key) for key in keys}))

    def deployment(self) -> Record:
        urns = [f"urn:pulumi:demo::gpuctl::{one['type']}::{one['name']}" for one in self.resources]
        return {"resources": [{"urn": urn, "type": urn.split("::")[2]} for urn in urns]}


class Events:
    """The log that the Automation API reads along."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sequence = 0

    def step(self, event: str, verb: str, kind: str, name: str) -> None:
        urn = f"urn:pulumi:demo::gpuctl::{kind}::{name}"
        about = {"type": kind, "urn": urn, "custom": True, "id": "", "parent": "", "inputs": {}, "outputs": {}}
        whole = {**about, "provider": ""}
        old = None if verb.startswith("create") else whole
        new = None if verb.startswith("delete") else whole
        said = {"op": verb, "urn": urn, "type": kind, "old": old, "new": new, "detailedDiff": None, "provider": ""}
        self._write({event: {"metadata": said}})

    def failed(self, verb: str, kind: str, name: str, why: str) -> None:
        urn = f"urn:pulumi:demo::gpuctl::{kind}::{name}"
        said = {"urn": urn, "prefix": "", "message": why, "color": "raw", "severity": "error"}
        self._write({"diagnosticEvent": said})
        self.step("resOpFailedEvent", verb, kind, name)

    def end(self) -> None:
        self._write({"summaryEvent": {"maybeCorrupt": False, "durationSeconds": 1, "resourceChanges": {}}})
        self._write({"cancelEvent": {}})

    def _write(self, event: Record) -> None:
        self._sequence += 1
        with Path(self._path).open("a") as file:
            file.write(json.dumps({"sequence": self._sequence, "timestamp": 0, **event}) + "\n")


# -- verbs ------------------------------------------------------------------------------------------------------------


def main(args: list[str]) -> int:
    words = [word for word in args if not word.startswith("-")]
    verb = " ".join(words[:2]) if words[:1] in (["stack"], ["plugin"], ["config"]) else (words or ["version"])[0]
    if "version" in args:
        print("v3.200.0")
        return 0
    state = State(Path.cwd() / "state.json")
    if verb == "stack select" and not state.there:
        print("error: no stack named 'demo' found", file=sys.stderr)
        return 255
    if verb in ("up", "destroy", "refresh"):
        events = Events(args[args.index("--event-log") + 1])
        code = {"up": _up, "destroy": _destroy, "refresh": _refresh}[verb](args, state, events)
        events.end()
        return code
    state.there = (state.there or verb == "stack init") and verb != "stack rm"
    state.save()
    print(json.dumps(_answer(verb, state)))
    return 0


def _up(args: list[str], state: State, events: Events) -> int:
    # Most calls of the CLI run no program, and Pulumi takes a second to import.
    from tests.stacks.made import Made
    from tests.stacks.monitor import run

    client = next(arg.removeprefix("--client=") for arg in args if arg.startswith("--client="))
    monitor = Made(state, events)
    refused = run(client, monitor)
    if refused:
        print("error: update failed", file=sys.stderr)
        return 255
    state.outputs = monitor.outputs
    state.save()
    unwanted = [one for one in state.resources if (one["type"], one["name"]) not in monitor.resources]
    return _take_away(state, events, state.replaced, "delete-replaced") or _take_away(state, events, unwanted)


def _destroy(args: list[str], state: State, events: Events) -> int:
    del args
    if refused := _take_away(state, events, state.resources) or _take_away(
        state, events, state.replaced, "delete-replaced"
    ):
        return refused
    state.outputs = {}
    state.save()
    return 0


def _take_away(state: State, events: Events, them: list[Record], verb: str = "delete") -> int:
    """The last one first. The exit status of the verb that asks for it."""
    from tests.stacks.made import UNMAKERS

    for one in list(reversed(them)):
        events.step("resourcePreEvent", verb, one["type"], one["name"])
        if not one["kept"] and (unmake := UNMAKERS.get(one["type"])):
            try:
                unmake(one["told"]["id"])
            except Exception as error:  # noqa: BLE001 - whatever the cloud says no with
                events.failed(verb, one["type"], one["name"], str(error))
                print("error: update failed", file=sys.stderr)
                return 255
        (state.replaced if verb == "delete-replaced" else state.resources).remove(one)
        state.save()
        events.step("resOutputsEvent", verb, one["type"], one["name"])
    return 0


def _refresh(args: list[str], state: State, events: Events) -> int:
    """What is gone is known no more."""
    from tests.stacks.made import SEEN

    del args
    for one in list(state.resources):
        if one["type"] in SEEN and not SEEN[one["type"]](one["told"]["id"]):
            state.resources.remove(one)
            events.step("resOutputsEvent", "delete", one["type"], one["name"])
    state.save()
    return 0


def _answer(verb: str, state: State) -> Any:
    update = {"kind": "update", "startTime": "2026-11-21T18:00:00.000Z", "message": "", "environment": {}, "config": {}}
    return {
        "stack output": state.outputs,
        "stack history": [{**update, "result": "succeeded"}],
        "stack export": {"version": 3, "deployment": state.deployment()},
    }.get(verb)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
