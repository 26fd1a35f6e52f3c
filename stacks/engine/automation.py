"""The engine: a cluster's stack, made, changed and taken away through Pulumi's Automation API.

Nothing else knows that API. The program runs in this process; Pulumi's CLI does the rest.

::

    <state>/pulumi/<cluster>/         where the CLI works
    <state>/pulumi/<cluster>/state/   the state, unless a backend is named
    <state>/pulumi-cli/               a CLI for gpuctl alone, where there is none on PATH (see ``pulumi_install``)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pulumi
from pulumi.automation import (
    CommandError,
    LocalWorkspace,
    ProjectSettings,
    PulumiCommand,
    Stack,
    StackNotFoundError,
)

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks import program
from gpuctl.stacks.engine.deployment import InterruptedCreation, StateResource, has_pending, resources, unknown
from gpuctl.stacks.engine.errors import FailureKind, StackFailed, cancelled, failure, unwritable
from gpuctl.stacks.engine.events import EventListener, OnProgress
from gpuctl.stacks.engine.interrupts import to_the_end
from gpuctl.stacks.engine.pulumi_install import found_cli
from gpuctl.stacks.engine.pulumi_process import STACK, OwnSession, ends_within, orphaned_engine, orphaned_plugins
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state.clusters import command
from gpuctl.stacks.state.paths import private_folder, state_dir

_PROJECT = "gpuctl"
_PASSPHRASE = "gpuctl"
"""Of a state on this machine, which holds no secret. Pulumi wants one; if it could be lost, the state could be too."""
_PASSPHRASE_FROM = ("PULUMI_CONFIG_PASSPHRASE", "PULUMI_CONFIG_PASSPHRASE_FILE")
_ORPHAN_S = 1800.0
"""Longest that an engine without its gpuctl is waited for. Machine groups of Azure take half an hour."""
_INTERRUPTED = "interrupted: waiting for Pulumi to finish; press Ctrl-C again to stop it now"


class Engine:
    """Runs Pulumi for one cluster. Every verb raises ``StackFailed`` and may be repeated.

    A lock that a process of this machine has left behind is cleared without asking, one of another machine's only with
    ``force``; a lock whose holder is seen to live is never cleared.

    Args:
        cluster: its name, which is the stack's too.
        backend: any URL that ``pulumi login`` takes; empty: a folder of this user's.
        command: Pulumi's CLI; ``None``: the one that ``found_cli`` finds.
        on_progress: hears of each resource while it is changed, in another thread.
        say: prints a line for a person.
    """

    def __init__(
        self,
        cluster: str,
        *,
        backend: str = "",
        command: PulumiCommand | None = None,
        on_progress: OnProgress = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._cluster = cluster
        self._backend = backend
        self._command = command
        self._on_progress = on_progress
        self._say = say
        self._interrupted = False
        """The last verb was, by the user."""

    def up(self, request: StackRequest, *, force: bool = False) -> dict[str, Any]:
        """Make what is missing, change what is different. Returns the stack's outputs (see ``Cloud``).

        What was replaced and is still in use, such as a template while Google has machines of it, is no failure: it is
        the last thing that Pulumi is at, and the next ``up`` or ``destroy`` tries again to take it away."""
        stack = self._stack(inline(request))
        try:
            done = self._change(stack, lambda listener: stack.up(on_event=listener, color="never"), force)
        except StackFailed as failed:
            if failed.kind is not FailureKind.LEFT:
                raise
            return self.outputs()
        return {name: output.value for name, output in done.outputs.items()}

    def refresh(self, *, force: bool = False) -> None:
        """Ask the cloud what has become of everything in the state."""
        stack = self._stack()
        self._change(stack, _refresh(stack), force)

    def destroy(self, *, force: bool = False) -> None:
        """Take everything away but what the program wants kept, then the stack itself."""
        stack = self._stack()
        self._change(stack, lambda listener: stack.destroy(on_event=listener, color="never"), force)
        # The CLI ends a destroy that was cancelled as if it had been done.
        if left := _left(stack):
            raise cancelled(self._cluster, left)
        with self._explained(stack):
            stack.workspace.remove_stack(self._cluster)

    def unknown(self, *, force: bool = False) -> tuple[InterruptedCreation, ...]:
        """The creations that were interrupted when an earlier change broke off. Of everything else that was interrupted
        the cloud itself knows what became of it, and is asked."""
        stack = self._stack()
        if not has_pending(self._exported(stack)):
            return ()
        # Takes the lock before it touches anything: while somebody else is at work, this is what says so.
        self._change(stack, _refresh(stack), force)
        return unknown(self._exported(stack))

    def forget_unknown(self, *, force: bool = False) -> None:
        """Remove ``unknown`` from the state, once nothing of it is there any more."""
        stack = self._stack()
        if has_pending(self._exported(stack)):
            self._change(stack, _refresh(stack, clear_pending_creates=True), force)

    def outputs(self) -> dict[str, Any]:
        """The outputs of the last ``up`` that succeeded."""
        stack = self._stack()
        with self._explained(stack):
            return {name: output.value for name, output in stack.outputs().items()}

    def resources(self) -> tuple[StateResource, ...]:
        """The resources that the state knows to be there."""
        return resources(self._exported(self._stack()))

    def forget(self) -> None:
        """The state, whatever it holds and whether it can be read or not: once nothing of the cluster is there."""
        if not self._backend:
            shutil.rmtree(self._folder() / "state", ignore_errors=True)
            for settings in self._folder().glob("Pulumi.*.yaml"):
                with contextlib.suppress(OSError):
                    settings.unlink()
            return
        try:
            stack = self._stack()
            with self._explained(stack):
                stack.workspace.remove_stack(self._cluster, force=True)
        except StackFailed as failed:
            if failed.kind is not FailureKind.NO_STACK:
                where = f"PULUMI_BACKEND_URL={shlex.quote(self._backend)} pulumi stack rm --force {self._cluster}"
                self._say(f"the stack's state could not be deleted: {failed.message}; to use the name again: {where}")

    def orphaned_plugins(self) -> list[psutil.Process]:
        """Those that go on although an earlier engine of this stack has ended."""
        return orphaned_plugins(str(self._folder()))

    def _folder(self) -> Path:
        return state_dir() / "pulumi" / self._cluster

    def _stack(self, declare: Callable[[], None] | None = None) -> Stack:
        """Only one that is about to be made (``declare``) is created if there is none."""
        try:
            return self._opened(declare)
        except StackNotFoundError as error:
            where = self._backend or "this machine"
            raise StackFailed(
                FailureKind.NO_STACK,
                f"there is no stack of {self._cluster} on {where}",
                f"create one with `{command('up', self._cluster)}`",
            ) from error
        except CommandError as error:
            raise failure(self._cluster, _written(error), ()) from error
        except OSError as error:
            raise unwritable(self._cluster, error) from error

    def _opened(self, declare: Callable[[], None] | None) -> Stack:
        folder = private_folder(self._folder())
        env = {
            "PULUMI_BACKEND_URL": self._backend or f"file://{private_folder(folder / 'state')}",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            STACK: str(folder),
        }
        if not (self._backend and any(name in os.environ for name in _PASSPHRASE_FROM)):
            env["PULUMI_CONFIG_PASSPHRASE"] = _PASSPHRASE
        self._command = self._command or OwnSession(found_cli())
        workspace = LocalWorkspace(
            work_dir=str(folder),
            program=declare,
            env_vars=env,
            secrets_provider="passphrase",
            project_settings=ProjectSettings(name=_PROJECT, runtime="python", main=str(folder)),
            pulumi_command=self._command,
        )
        return (Stack.create_or_select if declare else Stack.select)(self._cluster, workspace)

    def _exported(self, stack: Stack) -> Mapping[str, Any]:
        with self._explained(stack):
            return _deployment(stack)

    def _change(self, stack: Stack, verb: Callable[[EventListener], Any], force: bool) -> Any:
        try:
            return self._once(stack, verb)
        except StackFailed as failed:
            if self._waited_for_orphan(failed):
                return self._change(stack, verb, force)
            if failed.kind is not FailureKind.STALE and not (force and failed.kind is FailureKind.HELD):
                raise
            self._say(f"{failed.message}: clearing that lock")
        with self._explained(stack):
            stack.cancel()
        return self._once(stack, verb)

    def _waited_for_orphan(self, failed: StackFailed) -> bool:
        """Whether the stack was being changed by an engine whose gpuctl was killed, and which has come to its end."""
        engine = orphaned_engine(failed.holder.pid, str(self._folder())) if failed.holder else None
        if engine is None:
            return False
        self._say(f"{failed.message}, whose gpuctl has ended: waiting for it (to end it: kill {engine.pid})")
        return ends_within(engine, _ORPHAN_S)

    def _once(self, stack: Stack, verb: Callable[[EventListener], Any]) -> Any:
        listener = EventListener(self._on_progress)
        self._interrupted = False
        own = self._command if isinstance(self._command, OwnSession) else None
        try:
            with self._explained(stack, listener), own.one_verb() if own else contextlib.nullcontext():
                return to_the_end(lambda: verb(listener), self._interrupt)
        except StackFailed as failed:
            if failed.kind is FailureKind.OTHER and self._interrupted:  # in a run that knows no word for it
                raise cancelled(self._cluster, failed.left) from failed
            raise

    def _interrupt(self) -> None:
        if not self._interrupted:
            self._say(_INTERRUPTED)
        self._interrupted = True
        if isinstance(self._command, OwnSession):
            self._command.interrupt()

    @contextlib.contextmanager
    def _explained(self, stack: Stack, listener: EventListener | None = None) -> Iterator[None]:
        """Whatever the CLI says no with is a ``StackFailed``: Pulumi's own types tell too few of them apart, and not
        always (pulumi#11108)."""
        try:
            yield
        except CommandError as error:
            left = () if listener is None else _left(stack)
            raise failure(self._cluster, _written(error), listener.refusals() if listener else (), left) from error
        except OSError as error:
            raise unwritable(self._cluster, error) from error


def inline(request: StackRequest) -> Callable[[], None]:
    """The program that Pulumi runs in this process. What is wrong with the request is then a line, no traceback."""

    def declare() -> None:
        try:
            program.declare(request)
        except BadInput as error:
            raise pulumi.RunError(str(error)) from error

    return declare


def _refresh(stack: Stack, clear_pending_creates: bool = False) -> Callable[[EventListener], Any]:
    return lambda listener: stack.refresh(
        on_event=listener, color="never", clear_pending_creates=clear_pending_creates or None
    )


def _deployment(stack: Stack) -> Mapping[str, Any]:
    return stack.export_stack().deployment or {}


def _left(stack: Stack) -> tuple[str, ...]:
    """The resources in the state, such as ``aws:ec2/vpc:Vpc demo``. Empty, if not even that can be found out: the
    failure that is being told matters more."""
    try:
        return tuple(str(one) for one in resources(_deployment(stack)))
    except CommandError:
        return ()


def _written(error: CommandError) -> str:
    """The CLI's output, the error stream last. Pulumi's exception has it as text only."""
    return str(error).replace("\n stderr: ", "\n")
