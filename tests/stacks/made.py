"""The engine's side of a program, for ``pulumi_cli``: what is declared is made at once, or changed where it is declared
otherwise than before. What must then be taken away, ``pulumi_cli`` takes away once all the rest is done.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from pulumi.runtime.proto import resource_pb2

from tests.stacks import made_aws, made_azure, made_gcp
from tests.stacks.monitor import Monitor
from tests.stacks.pulumi_cli import Events, Record, State

MAKERS = {**made_aws.MAKERS, **made_azure.MAKERS, **made_gcp.MAKERS}
"""By Pulumi token: makes it of its inputs, and tells what it has come to be, its ``id`` too."""
UPDATERS = {**made_aws.UPDATERS, **made_azure.UPDATERS, **made_gcp.UPDATERS}
"""By Pulumi token: changes it by its ``id``, from inputs to others, and tells what of it is otherwise now."""
REPLACED = made_gcp.REPLACED
"""Pulumi tokens of what cannot be changed: another one is made first, and the old one goes last."""
UNMAKERS = {**made_aws.UNMAKERS, **made_azure.UNMAKERS, **made_gcp.UNMAKERS}
"""By Pulumi token: takes it away by its ``id``."""
SEEN = {**made_azure.SEEN, **made_gcp.SEEN}
"""By Pulumi token: whether it is still there, by its ``id``."""
ASKED = {**made_azure.ASKED}
"""By Pulumi token: what a program wants to know of the cloud, where it matters."""


class Made(Monitor):
    """What the program wants is made at once."""

    def __init__(self, state: State, events: Events) -> None:
        super().__init__()
        self.state = state
        self.events = events

    def Invoke(self, request: Any, context: Any) -> Any:  # noqa: N802 (Pulumi's name)
        answer = super().Invoke(request, context)
        getattr(answer, "return").update(ASKED[request.tok]() if request.tok in ASKED else {})
        return answer

    def RegisterResource(self, request: Any, context: Any) -> Any:  # noqa: N802 (Pulumi's name)
        inputs = MessageToDict(request.object)  # before the answer: it is written over them
        answer = super().RegisterResource(request, context)
        kind, name = request.type, request.name
        if not request.custom or kind.startswith("pulumi:"):
            return answer
        known = self.state.find(kind, name)
        if known is None:
            with self._telling("create", kind, name):
                told = MAKERS[kind](inputs) if kind in MAKERS else {}
            known = {"type": kind, "name": name, "kept": request.retainOnDelete, "told": told, "inputs": inputs}
            self.state.add(known)
        else:
            self._change(known, pinned(known["inputs"], inputs, request.ignoreChanges))
        made = answer.object
        made.update({key: value for key, value in known["told"].items() if key != "id"})
        return resource_pb2.RegisterResourceResponse(
            urn=answer.urn, id=known["told"].get("id", f"id of {name}"), object=made
        )

    def _change(self, known: Record, inputs: Record) -> None:
        kind, name, before = known["type"], known["name"], known["inputs"]
        if inputs == before:
            return
        if kind in REPLACED:
            with self._telling("create-replacement", kind, name):
                told = MAKERS[kind](inputs)
            self.state.replaced.append(copy.deepcopy(known))
            known["told"] = told
        else:
            with self._telling("update", kind, name):
                if kind not in UPDATERS:
                    differ = sorted(key for key in {*before, *inputs} if before.get(key) != inputs.get(key))
                    raise NotImplementedError(f"the stand-in cannot update {kind}: {', '.join(differ)}")
                known["told"].update(UPDATERS[kind](known["told"]["id"], before, inputs))
        known["inputs"] = inputs
        self.state.save()

    @contextmanager
    def _telling(self, verb: str, kind: str, name: str) -> Iterator[None]:
        self.events.step("resourcePreEvent", verb, kind, name)
        try:
            yield
        except Exception as error:
            self.events.failed(verb, kind, name, str(error))
            raise
        self.events.step("resOutputsEvent", verb, kind, name)


def pinned(before: Record, inputs: Record, paths: Iterable[str]) -> Record:
    """``inputs`` with what was there before at ``paths``, such as ``disks[0].sourceImage``: so Pulumi ignores changes.
    What the program says now of such a path counts for nothing, and what the cloud says neither."""
    kept = copy.deepcopy(inputs)
    for path in paths:
        *way, last = (int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", path))
        old: Any = before
        new: Any = kept
        for step in way:
            old, new = old[step], new[step]
        if last in old:
            new[last] = old[last]
        else:
            new.pop(last, None)
    return kept
