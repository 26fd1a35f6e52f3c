"""Remains of an earlier ``gpuctl up`` of a cluster: machines, a half-made stack, or one for other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import NoGroup
from gpuctl.stacks.clouds.interface import Cloud
from gpuctl.stacks.clouds.removal_by_tag import blind
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.providers.interface import Say
from gpuctl.stacks.rented.cluster_bucket import state_of
from gpuctl.stacks.rented.teardown import Teardown, TeardownEngine
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.immutable import for_good
from gpuctl.stacks.request.stack_request import StackRequest, today
from gpuctl.stacks.state.clusters import command


class UpEngine(TeardownEngine, Protocol):
    """The part of ``Engine`` that ``up`` uses."""

    def up(self, request: StackRequest, *, force: bool = False) -> dict[str, Any]: ...
    def outputs(self) -> dict[str, Any]: ...


def question(*, is_gone: bool, is_down: bool, is_repair: bool) -> str:
    """What the user is asked before anything is made: the group may be gone, or all of the cluster."""
    if is_down:
        return "Nothing of the cluster is left: it was removed without this machine's Pulumi state. Create it again?"
    if is_repair:
        return "Replace what is missing?"
    return "The machines' group is gone. Repair the cluster?" if is_gone else "Rent them?"


@dataclass(frozen=True, slots=True)
class EarlierUp:
    """Looks at, and clears away, what was made before. ``teardown`` gives that of a request."""

    there: Cloud
    engine: UpEngine
    teardown: Callable[[StackRequest], Teardown]
    say: Say

    def home(self, before: StackRequest | None) -> tuple[tuple[str, ...] | None, bool]:
        """The zones of machines that there are: they stay where they are; and whether the state knows of a group that
        is gone. Raises ``GpuctlError`` if the cloud does not tell: elsewhere, others would be made in their place."""
        try:
            outputs: Mapping[str, Any] = self.engine.outputs()
            return (tuple(outputs["zones"]) if self.there.size(outputs).names else None), False
        except StackFailed as failed:
            if failed.kind is not FailureKind.NO_STACK:
                raise
            if before is not None:
                self._refuse_lost_state(before)
            return None, False
        except NoGroup:
            return None, True
        except KeyError:  # half made: no group yet
            return None, False

    def forget(self, request: StackRequest) -> StackRequest:
        """Forget a stack of which nothing is left; returns the request for one that begins anew.

        A refresh would keep what a cloud only marks as deleted, such as a role of Google's, and never bring it back.
        """
        self.engine.forget()
        return msgspec.structs.replace(request, created=today())

    def settle(self, request: StackRequest, home: tuple[str, ...] | None, force: bool) -> None:
        """Clear up what an earlier change was creating when it was interrupted: it may exist, in no state."""
        try:
            unknown = self.engine.unknown(force=force)
        except StackFailed as failed:
            if failed.kind is FailureKind.NO_STACK:
                return
            raise
        if not unknown:
            return
        if home is not None:
            self.teardown(request).strays(unknown)
            return
        self.say(f"an earlier `{command('up', request.cluster)}` was interrupted: removing what it left")
        before = last_request.find(request.cluster)  # which may have been for another region
        self._clear(before.request if before else request, force)

    def make_way(self, request: StackRequest, force: bool) -> None:
        """Remove a stack without machines that was made for others than these or elsewhere: much of it cannot be
        changed. The bucket stays."""
        before = last_request.find(request.cluster)
        if before is None or for_good(before.request) == for_good(request) or not state_of(self.engine):
            return
        self._clear(before.request, force)
        self.say(f"{before.request.where()} is cleaned up")

    def _clear(self, before: StackRequest, force: bool) -> None:
        """Remove everything but the bucket. Raises ``GpuctlError`` if something is left, or if that is not known."""
        teardown = self.teardown(before)
        down = command("down", before.cluster)
        scan = teardown.all(force=force)
        if left := teardown.mine(scan):
            where = left[0].region or before.provider
            raise GpuctlError(f"{left[0].kind} {left[0].id} in {where} could not be removed", f"run `{down}`")
        if why := blind(scan):
            raise GpuctlError(f"could not check {why}, where machines may be left", f"run `{down}`")

    def _refuse_lost_state(self, before: StackRequest) -> None:
        """Refuse ``up`` without the stack's state: the machines of the last ``up`` would be made once more, beside
        those that run. Raises ``BadInput`` if there is something of the cluster in the cloud."""
        scan = self.there.leftovers([before.region], before.cluster)
        mine = tuple(self.teardown(before).mine(scan))
        if mine or blind(scan):
            told = msgspec.structs.replace(scan, found=mine).summary() or f"could not check {blind(scan)}"
            down = command("down", before.cluster)
            raise BadInput(
                f"Pulumi's state of {before.cluster} is gone; what is in {before.region}: {told}",
                f"restore the state, or run `{down}`, which removes by tag and keeps the bucket, then repeat this",
            )
