"""Taking a cluster away, and the proof: by Pulumi's state as far as there is one, and by the cluster's tags.

The state may be gone, damaged, sealed with a lost passphrase, or know less than there is; the CLI or a plug-in may be
missing. None of that keeps a machine running: what carries the cluster's identity in its tags is deleted without it.
Nothing else is: things of another cluster of the same name, or with a tag that somebody set by hand, are only named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import psutil

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.clouds.interface import Cloud
from gpuctl.stacks.clouds.removal_by_tag import removed
from gpuctl.stacks.engine.deployment import InterruptedCreation, StateResource
from gpuctl.stacks.engine.errors import FailureKind, StackFailed
from gpuctl.stacks.providers.interface import Say
from gpuctl.stacks.request.stack_request import StackRequest

_LATE_S = (10.0, 20.0, 40.0, 80.0, 160.0)
"""Between tries to destroy: a placement group goes after its machines have, a network after its cards have."""
_PLUGIN_S = 600.0
"""Longest that a plug-in without its engine is waited for: it may be creating something."""
_NOT_OURS_TO_END = (FailureKind.CANCELLED, FailureKind.BUSY, FailureKind.HELD)
"""Somebody said stop, or somebody else is at work: the state decides, and not what is there."""
_BESIDE_MACHINES = {
    "aws:ec2/keyPair:KeyPair": "key pair",
    "aws:ec2/securityGroup:SecurityGroup": "security group",
    "aws:ec2transitgateway/instanceConnectEndpoint:InstanceConnectEndpoint": "instance connect endpoint",
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": "security group rule",
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": "security group rule",
    "gcp:compute/firewall:Firewall": "firewall rule",
    "gcp:compute/instanceTemplate:InstanceTemplate": "instance template",
}
"""What an ``up`` may create while machines run, by Pulumi token, and what the cloud's own calls it."""


class TeardownEngine(Protocol):
    """The part of ``Engine`` that this module uses."""

    def refresh(self, *, force: bool = False) -> None: ...
    def destroy(self, *, force: bool = False) -> None: ...
    def unknown(self, *, force: bool = False) -> tuple[InterruptedCreation, ...]: ...
    def forget_unknown(self, *, force: bool = False) -> None: ...
    def resources(self) -> tuple[StateResource, ...]: ...
    def forget(self) -> None: ...
    def orphaned_plugins(self) -> list[psutil.Process]: ...


class Teardown:
    """The removal of one cluster.

    Args:
        request: names the cluster, its identity and its region.
        there: the cloud.
        state: the engine of the cluster's stack.
        say: prints a line of progress.
        pause: sleeps for so many seconds between two tries.
        now: a clock in seconds, for the wait for plug-ins.
    """

    def __init__(
        self,
        request: StackRequest,
        there: Cloud,
        state: TeardownEngine,
        say: Say,
        *,
        pause: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._there = there
        self._state = state
        self._say = say
        self._pause = pause
        self._now = now
        self._regions = [request.region]

    def all(self, *, force: bool = False) -> Scan:
        """Everything but the bucket. Returns the last scan: what is left, and what could not be looked at.

        Raises ``StackFailed`` if it was interrupted or somebody else is at work on the stack, ``GpuctlError`` if the
        cloud cannot be asked.
        """
        self._try(self._add_regions)
        if self._has_namesake():
            return self._beside_a_namesake(force)
        failed = self._by_state(force)
        scan = self._by_tag()
        if failed is not None and failed.kind is not FailureKind.NO_STACK:
            if failed.kind in (FailureKind.RESOURCE, FailureKind.LEFT):
                failed = self._try(lambda: self._state.destroy(force=force))
                scan = self.scan()
            if failed is not None and not self.mine(scan) and not scan.unseen:
                self._state.forget()
        return scan

    def scan(self) -> Scan:
        """Scan for what has the cluster's name, whosever it is."""
        return self._there.leftovers(self._regions, self._request.cluster)

    def mine(self, scan: Scan) -> list[Leftover]:
        """The resources of this cluster, and of no other of its name: one that older versions made, without an
        identity, has what carries none."""
        return [one for one in scan.found if one.cluster_id == self._request.id]

    def is_done(self) -> bool:
        """Whether nothing of the cluster is left, whatever the state says, in all its regions."""
        self._try(self._add_regions)
        scan = self.scan()
        return not self.mine(scan) and not scan.unseen

    def strays(self, unknown: Sequence[InterruptedCreation]) -> None:
        """Clean up a cluster whose machines run: delete what ``unknown`` has left and the state has no id of, so that
        it can be created again."""
        self._wait_for_plugins(unknown)
        kinds = {_BESIDE_MACHINES[one.type] for one in unknown if one.type in _BESIDE_MACHINES}
        known = [one.id for one in self._state.resources()]
        mine = self.mine(self.scan())
        there = [*mine, *self._there.parts(mine)]
        strays = [one for one in there if one.kind in kinds and not _is_known(one, known)]
        if strays:
            self._there.remove(strays, self._say)
        self._state.forget_unknown()

    def _has_namesake(self) -> bool:
        """Whether another cluster of this name is there. Where the cloud does not tell, the state decides."""
        try:
            found = self.scan().found
        except GpuctlError:
            return False
        return bool(self._request.id) and any(one.cluster_id not in ("", self._request.id) for one in found)

    def _beside_a_namesake(self, force: bool) -> Scan:
        """By tag only: much of what the state lists has a name and no other id, and may be the other's by now."""
        self._say(f"another cluster named {self._request.cluster} is there: removing by tag, not by Pulumi's state")

        def ask() -> None:
            self._state.unknown(force=force)

        self._try(ask)  # raises if somebody is at work
        self._wait_for_plugins(())
        scan = self._by_tag()
        if not self.mine(scan) and not scan.unseen:
            self._state.forget()
        return scan

    def _add_regions(self) -> None:
        """Those of the state, if it can be read: an ``up`` may have been asked for elsewhere since."""
        found = {one.region for one in self._state.resources()} - {"", self._request.region}
        self._regions += sorted(found)

    def _by_state(self, force: bool) -> StackFailed | None:
        """``None``: done, as far as the state knows."""
        unknown: tuple[InterruptedCreation, ...] = ()

        def settle() -> None:
            nonlocal unknown
            unknown = self._state.unknown(force=force)

        failed = self._try(settle)
        if failed is None and unknown:
            # First: what stands in a network keeps it from going, for as long as the plug-in has patience.
            self._say(
                f"an earlier change was interrupted while creating {', '.join(map(str, unknown))}: looking for it"
            )
            self._wait_for_plugins(unknown)
            self._remove_strays()
            failed = self._try(lambda: self._state.forget_unknown(force=force))
        failed = failed or self._destroyed(force, late_strays=bool(unknown))
        if failed is not None:
            self._say(failed.message)
            if failed.kind is not FailureKind.NO_STACK:
                self._say("removing resources by tag")
            self._wait_for_plugins(())
        return failed

    def _remove_strays(self) -> None:
        """What the state has no id of."""
        known = [one.id for one in self._state.resources()]
        if strays := [one for one in self.mine(self.scan()) if not _is_known(one, known)]:
            self._there.remove(strays, self._say)

    def _destroyed(self, force: bool, late_strays: bool) -> StackFailed | None:
        """``late_strays``: a creation was interrupted, whose resource may show only now: its request was with the cloud
        when the plug-in ended."""
        for late_s in (*_LATE_S, None):
            failed = self._try(lambda: self._state.destroy(force=force))
            if failed is None or failed.kind not in (FailureKind.RESOURCE, FailureKind.LEFT) or failed.is_forbidden:
                return failed
            if late_s is not None:
                self._say(f"{failed.message}; trying again in {late_s:.0f} s")
                self._pause(late_s)
                if late_strays:
                    self._remove_strays()
        return failed

    def _by_tag(self) -> Scan:
        """The last scan, of all that has the cluster's name."""
        last = self.scan()

        def mine_again() -> Scan:
            nonlocal last
            last = self.scan()
            return self._only_mine(last)

        removed(self._there, self._only_mine(last), self._say, mine_again)
        return last

    def _only_mine(self, scan: Scan) -> Scan:
        return msgspec.structs.replace(scan, found=tuple(self.mine(scan)))

    def _try(self, verb: Callable[[], None]) -> StackFailed | None:
        try:
            verb()
        except StackFailed as failed:
            if failed.kind in _NOT_OURS_TO_END:
                raise
            return failed
        return None

    def _wait_for_plugins(self, unknown: Sequence[InterruptedCreation]) -> None:
        """Those whose engine has ended go on with what they were asked for; what they make is not there yet."""
        until = self._now() + _PLUGIN_S
        told = False
        while (orphans := self._state.orphaned_plugins()) and self._now() < until:
            if not told:
                what = f" create {', '.join(map(str, unknown))}" if unknown else " be at work"
                self._say(f"waiting for {orphans[0].name()} (pid {orphans[0].pid}), which may still{what}")
            told = True
            self._pause(1.0)


def _is_known(one: Leftover, ids: Sequence[str]) -> bool:
    """Pulumi knows some things by a path that ends with what a scan calls them, and things of several kinds may have
    one name: of a path, the kind counts too, as in ``…/networks/gpuctl-demo``."""
    tail = "/".join(one.ref.split("/")[-2:]) or one.id
    return any(id_ and (id_ in (one.id, one.ref) or f"/{id_}".endswith(f"/{tail}")) for id_ in ids)
