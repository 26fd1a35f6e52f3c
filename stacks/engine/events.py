"""The events of Pulumi's engine while it is at work: progress for people, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pulumi.automation import EngineEvent
from pulumi.automation.events import DiagnosticEvent, StepEventMetadata

from gpuctl.stacks.engine.deployment import NO_THING
from gpuctl.stacks.engine.errors import ResourceFailure, first_line, place


@dataclass(frozen=True, slots=True)
class ResourceProgress:
    """A change in one resource's progress."""

    name: str
    type: str
    """Pulumi token, such as ``aws:ec2/vpc:Vpc``."""
    operation: str
    """``create``, ``update``, ``delete``, ``refresh``, …; ``keep``: the state lets go of it, and it stays."""
    state: Literal["running", "done", "failed"]
    error: str = ""
    """What the provider said, in one line."""


OnProgress = Callable[[ResourceProgress], None]
"""Called from another thread, one call at a time, while a verb of the engine runs. Must not raise."""


class EventListener:
    """Listens to one operation's events: passes progress on, keeps failures."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._failed: dict[str, str] = {}
        """Operation by URN."""
        self._said: dict[str, str] = {}
        """Errors by URN, the first words first."""

    def __call__(self, event: EngineEvent) -> None:
        if event.resource_pre_event:
            self._step(event.resource_pre_event.metadata, "running")
        elif event.res_outputs_event:
            self._step(event.res_outputs_event.metadata, "done")
        elif event.res_op_failed_event:
            metadata = event.res_op_failed_event.metadata
            self._failed[metadata.urn] = metadata.op.value
            self._step(metadata, "failed")
        elif event.diagnostic_event and event.diagnostic_event.severity == "error":
            self._diagnosed(event.diagnostic_event)

    def refusals(self) -> list[ResourceFailure]:
        """Failures, in the order in which they came. What is said of the stack as a whole counts if nothing else is
        said."""
        told = [
            ResourceFailure(*place(urn), operation=self._failed.get(urn, ""), said=self._said.get(urn, ""))
            for urn in {**self._said, **self._failed}
        ]
        return [refusal for refusal in told if refusal.type not in ("", "pulumi:pulumi:Stack")] or told

    def _step(self, step: StepEventMetadata, state: Literal["running", "done", "failed"]) -> None:
        if step.op.value == "same" or (step.type.startswith(NO_THING) and state != "failed"):
            return
        kind, name = place(step.urn)
        error = first_line(self._said.get(step.urn, "")) if state == "failed" else ""
        is_kept = step.op.value.startswith("delete") and step.old is not None and bool(step.old.retain_on_delete)
        self._on_progress(ResourceProgress(name, kind, "keep" if is_kept else step.op.value, state, error))

    def _diagnosed(self, diagnostic: DiagnosticEvent) -> None:
        urn = diagnostic.urn or ""
        self._said[urn] = f"{self._said.get(urn, '')}\n{diagnostic.message}"
