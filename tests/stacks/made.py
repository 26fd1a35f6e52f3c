"""The engine's side of a program, for ``pulumi_cli``: what is declared is made at once."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from pulumi.runtime.proto import resource_pb2

from tests.stacks import made_aws, made_azure, made_gcp
from tests.stacks.monitor import Monitor
from tests.stacks.pulumi_cli import Events, State

MAKERS = {**made_aws.MAKERS, **made_azure.MAKERS, **made_gcp.MAKERS}
"""By Pulumi token: makes it of its inputs, and tells what it has come to be, its ``id`` too."""
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
            self.events.step("resourcePreEvent", "create", kind, name)
            try:
                told = MAKERS[kind](inputs) if kind in MAKERS else {}
            except Exception as error:
                self.events.failed("create", kind, name, str(error))
                raise
            known = {"type": kind, "name": name, "kept": request.retainOnDelete, "told": told}
            self.state.add(known)
            self.events.step("resOutputsEvent", "create", kind, name)
        made = answer.object
        made.update({key: value for key, value in known["told"].items() if key != "id"})
        return resource_pb2.RegisterResourceResponse(
            urn=answer.urn, id=known["told"].get("id", f"id of {name}"), object=made
        )
