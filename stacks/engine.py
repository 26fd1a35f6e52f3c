"""The engine: a cluster's stack, made, changed and taken away through Pulumi's Automation API.

Nothing else knows that API. The program runs in this process; Pulumi's CLI does the rest.

::

    <state>/pulumi/.passphrase        of the secrets in all states, made once, for this user alone
    <state>/pulumi/<cluster>/         where the CLI works
    <state>/pulumi/<cluster>/state/   the state, unless a backend is named
    <state>/pulumi-cli/bin/pulumi     a CLI for gpuctl alone, where there is none on PATH
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

import pulumi
from pulumi.automation import (
    CommandError,
    EngineEvent,
    LocalWorkspace,
    ProjectSettings,
    PulumiCommand,
    Stack,
    StackNotFoundError,
)
from pulumi.automation.events import DiagnosticEvent, StepEventMetadata
from semver import VersionInfo

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks import program
from gpuctl.stacks.failures import CLEARABLE, Failure, Refusal, StackFailed, failure, first_line, interrupted, place
from gpuctl.stacks.known import state_dir
from gpuctl.stacks.passphrase import passphrase, private_folder
from gpuctl.stacks.request import StackRequest

OLDEST_CLI = VersionInfo(3, 181, 0)
"""The first with all that the Automation API of the pinned SDK asks for."""
_PROJECT = "gpuctl"
_NO_THING = ("pulumi:", "gpuctl:")
"""Types of stacks, providers and components: none of them is anything in a cloud."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one resource has come to, each time that changes."""

    name: str
    type: str
    """Pulumi token, such as ``aws:ec2/vpc:Vpc``."""
    operation: str
    """``create``, ``update``, ``delete``, ``refresh``, …"""
    state: Literal["running", "done", "failed"]
    error: str = ""
    """What the provider said, in one line."""


OnProgress = Callable[[Progress], None]
"""Called from another thread, one call at a time, while a verb of the engine runs. Must not raise."""


class Engine:
    """Of one cluster. Every verb raises ``StackFailed`` and may be repeated. ``force`` first clears what a crash has
    left: locks, and operations whose outcome nobody knows. A lock whose holder is seen to live is never cleared."""

    def __init__(
        self,
        cluster: str,
        *,
        backend: str = "",
        command: PulumiCommand | None = None,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        """``backend``: any URL that ``pulumi login`` takes; empty: a folder of this user's. ``command``: another CLI
        than the one ``found_cli`` finds."""
        self._cluster = cluster
        self._backend = backend
        self._command = command
        self._on_progress = on_progress

    def up(self, request: StackRequest, *, force: bool = False) -> dict[str, Any]:
        """Make what is missing, change what is different. Returns the stack's outputs (see ``cloud.Cloud``).

        What was replaced and is still in use, such as a template while Google has machines of it, is no failure: it is
        the last thing that Pulumi is at, and the next ``up`` or ``destroy`` tries again to take it away."""
        stack = self._stack(inline(request))
        self._settle(stack, force)
        try:
            done = self._change(stack, lambda heard: stack.up(on_event=heard, color="never"), force)
        except StackFailed as failed:
            if failed.kind is not Failure.LEFT:
                raise
            return self.outputs()
        return {name: output.value for name, output in done.outputs.items()}

    def preview(self, request: StackRequest) -> dict[str, int]:
        """How many resources ``up`` would create, update, delete, …, by Pulumi's word for it."""
        stack = self._stack(inline(request))
        done = self._change(stack, lambda heard: stack.preview(on_event=heard, color="never"), force=False)
        return {str(getattr(kind, "value", kind)): many for kind, many in done.change_summary.items()}

    def refresh(self, *, force: bool = False) -> None:
        """Ask the cloud what has become of everything in the state."""
        stack = self._stack()
        self._settle(stack, force)
        self._change(stack, _refresh(stack), force)

    def destroy(self, *, force: bool = False) -> None:
        """Take everything away but what the program wants kept, then the stack itself."""
        stack = self._stack()
        self._settle(stack, force)
        self._change(stack, lambda heard: stack.destroy(on_event=heard, color="never", remove=True), force)

    def cancel(self) -> None:
        """End an update that goes on. With a backend that has no server, this removes its lock and nothing else."""
        stack = self._stack()
        with self._explained(stack):
            stack.cancel()

    def outputs(self) -> dict[str, Any]:
        """Of the last ``up`` that succeeded."""
        stack = self._stack()
        with self._explained(stack):
            return {name: output.value for name, output in stack.outputs().items()}

    def resources(self) -> tuple[str, ...]:
        """What the state knows to be there, as ``aws:ec2/vpc:Vpc demo``."""
        stack = self._stack()
        with self._explained(stack):
            return _resources(_deployment(stack))

    def _stack(self, declare: Callable[[], None] | None = None) -> Stack:
        """Only one that is about to be made (``declare``) is created if there is none."""
        folder = private_folder(state_dir() / "pulumi" / self._cluster)
        workspace = LocalWorkspace(
            work_dir=str(folder),
            program=declare,
            env_vars={
                "PULUMI_BACKEND_URL": self._backend or f"file://{private_folder(folder / 'state')}",
                "PULUMI_CONFIG_PASSPHRASE": passphrase(self._backend),
                "PULUMI_SKIP_UPDATE_CHECK": "true",
            },
            secrets_provider="passphrase",
            project_settings=ProjectSettings(name=_PROJECT, runtime="python", main=str(folder)),
            pulumi_command=self._command or found_cli(),
        )
        try:
            return (Stack.create_or_select if declare else Stack.select)(self._cluster, workspace)
        except StackNotFoundError as error:
            where = self._backend or "this machine"
            raise StackFailed(
                Failure.NO_STACK, f"there is no stack of {self._cluster} on {where}", "make one with `gpuctl up`"
            ) from error
        except CommandError as error:
            raise failure(self._cluster, _written(error), ()) from error

    def _settle(self, stack: Stack, force: bool) -> None:
        """Operations that were interrupted: the cloud knows what became of changes, not what became of something that
        the state has no id of. Those stop a verb, for a machine could run there that nobody pays attention to."""
        if not self._pending(stack):
            return
        # Takes the lock before it touches anything: while somebody else is at work, this is what says so.
        self._change(stack, _refresh(stack), force)
        pending = self._pending(stack)
        if pending and not force:
            raise interrupted(self._cluster, pending)
        if pending:
            self._once(stack, _refresh(stack, clear_pending_creates=True))

    def _pending(self, stack: Stack) -> list[str]:
        """As ``creating aws:ec2/vpc:Vpc demo``."""
        with self._explained(stack):
            waiting = _deployment(stack).get("pending_operations") or ()
            return [f"{one['type']} {' '.join(place(one['resource']['urn']))}" for one in waiting]

    def _change(self, stack: Stack, verb: Callable[[_Heard], Any], force: bool) -> Any:
        try:
            return self._once(stack, verb)
        except StackFailed as failed:
            if not force or failed.kind not in CLEARABLE:
                raise
        with self._explained(stack):
            stack.cancel()
        self._once(stack, _refresh(stack, clear_pending_creates=True))
        return self._once(stack, verb)

    def _once(self, stack: Stack, verb: Callable[[_Heard], Any]) -> Any:
        heard = _Heard(self._on_progress)
        with self._explained(stack, heard):
            return _to_the_end(lambda: verb(heard))

    @contextlib.contextmanager
    def _explained(self, stack: Stack, heard: _Heard | None = None) -> Iterator[None]:
        """Whatever the CLI says no with is a ``StackFailed``: Pulumi's own types tell too few of them apart, and not
        always (pulumi#11108)."""
        try:
            yield
        except CommandError as error:
            left = () if heard is None else _left(stack)
            raise failure(self._cluster, _written(error), heard.refusals() if heard else (), left) from error


def found_cli() -> PulumiCommand:
    """The one on PATH, else gpuctl's own. Raises ``StackFailed`` if there is none, or none that is new enough."""
    own = state_dir() / "pulumi-cli"
    hint = f"install {OLDEST_CLI} or newer (pulumi.com/docs/install), or put it at {own / 'bin' / 'pulumi'}"
    roots: list[str | None] = [None] if shutil.which("pulumi") else []
    roots += [str(own)] if (own / "bin" / "pulumi").is_file() else []
    versions: list[str] = []
    for root in roots:
        try:
            found = PulumiCommand(root=root, skip_version_check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise StackFailed(Failure.NO_CLI, f"Pulumi's CLI does not run: {error}", hint) from error
        if found.version is not None and found.version >= OLDEST_CLI:
            return found
        versions.append(str(found.version or "of a version that it does not tell"))
    if versions:
        raise StackFailed(Failure.OLD_CLI, f"Pulumi's CLI is {versions[0]}, which is too old", hint)
    raise StackFailed(Failure.NO_CLI, "Pulumi's CLI is not installed", hint)


def inline(request: StackRequest) -> Callable[[], None]:
    """The program that Pulumi runs in this process. What is wrong with the request is then a line, no traceback."""

    def declare() -> None:
        try:
            program.declare(request)
        except BadInput as error:
            raise pulumi.RunError(str(error)) from error

    return declare


class _Heard:
    """Listens to one verb's events: passes progress on, keeps what went wrong."""

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

    def refusals(self) -> list[Refusal]:
        """In the order in which they came. What is said of the stack as a whole counts if nothing else is said."""
        told = [
            Refusal(*place(urn), operation=self._failed.get(urn, ""), said=self._said.get(urn, ""))
            for urn in {**self._said, **self._failed}
        ]
        return [refusal for refusal in told if refusal.type not in ("", "pulumi:pulumi:Stack")] or told

    def _step(self, step: StepEventMetadata, state: Literal["running", "done", "failed"]) -> None:
        if step.op.value == "same" or (step.type.startswith(_NO_THING) and state != "failed"):
            return
        kind, name = place(step.urn)
        error = first_line(self._said.get(step.urn, "")) if state == "failed" else ""
        self._on_progress(Progress(name, kind, step.op.value, state, error))

    def _diagnosed(self, diagnostic: DiagnosticEvent) -> None:
        urn = diagnostic.urn or ""
        self._said[urn] = f"{self._said.get(urn, '')}\n{diagnostic.message}"


def _refresh(stack: Stack, clear_pending_creates: bool = False) -> Callable[[_Heard], Any]:
    return lambda heard: stack.refresh(
        on_event=heard, color="never", clear_pending_creates=clear_pending_creates or None
    )


def _to_the_end(verb: Callable[[], Any]) -> Any:
    """Ctrl-C reaches the CLI as well: it ends what it is at and fails as cancelled; a second one ends it at once. To
    leave before it does would close its pipes, and kill it with operations that no state knows the outcome of."""
    was_interrupted = False
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(verb)
        while not running.done():
            try:
                wait([running])
            except KeyboardInterrupt:
                was_interrupted = True
    if was_interrupted and running.exception() is None:
        raise KeyboardInterrupt
    return running.result()


def _deployment(stack: Stack) -> Mapping[str, Any]:
    return stack.export_stack().deployment or {}


def _resources(deployment: Mapping[str, Any]) -> tuple[str, ...]:
    there = [one for one in deployment.get("resources") or () if not one["type"].startswith(_NO_THING)]
    return tuple(" ".join(place(one["urn"])) for one in there)


def _left(stack: Stack) -> tuple[str, ...]:
    """Nothing, if not even that can be found out: the failure that is being told matters more."""
    try:
        return _resources(_deployment(stack))
    except CommandError:
        return ()


def _written(error: CommandError) -> str:
    """What the CLI wrote, the error stream last. Pulumi's exception has it as text only."""
    return str(error).replace("\n stderr: ", "\n")
