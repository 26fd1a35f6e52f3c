"""What a node does turn by turn: mingle, have the one run that the newest rounds ask of it, report how that ended, and
leave after a notice.

It starts no process and no thread, and reads no clock of its own: the agent gives it those (``agent``), and the tests'
simulation gives it fake ones (``tests/cluster/simulation.py``), so that what is proven there is what nodes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import PreemptionNotice
from gpuctl.cluster.records.rounds import NodeExit, Round
from gpuctl.cluster.storage.interface import Store


class Decisions(Protocol):
    """The cluster's decisions: ``cluster.membership.mingle.Mingle`` as it is seen from here."""

    @property
    def jobs(self) -> Mapping[str, Version[Round]]:
        """The newest round of each unfinished job."""

    def tick(self) -> bool:
        """Look anew. ``True``: this node has decided something."""


class Work(Protocol):
    """This node's part in one round. Whatever changes ``exit`` wakes the loop."""

    @property
    def exit(self) -> NodeExit | None: ...

    def is_of(self, round_: Round) -> bool: ...

    def ask_to_stop(self, round_: Round) -> None:
        """Ask the workers to stop after a last checkpoint, as a draining round says; called again in every turn."""

    def kill(self) -> None: ...

    def send_last_words(self) -> None:
        """What the workers wrote, before it is told how they ended."""

    def end(self) -> None:
        """It is over, and no round asks for it any more."""


W = TypeVar("W", bound=Work)


class Surroundings(Protocol):
    """What the others learn from this node, and by what."""

    @property
    def told_of_notice(self) -> bool:
        """Whether its heartbeat has said that it will be taken."""

    def send_heartbeat(self) -> None: ...

    def poke(self) -> None:
        """Tell the others that there is something new to read."""

    def wake(self) -> None:
        """Have another turn at once."""

    def say(self, line: str) -> None:
        """Print a line to the agent's log."""


class Reconciler(Generic[W]):
    """Brings a node to what the newest rounds say. ``notice`` is safe in a signal handler, the rest in one thread."""

    def __init__(
        self,
        node: str,
        incarnation: str,
        store: Store,
        clock: Clock,
        mingle: Decisions,
        begin: Callable[[Round, int], W],
        around: Surroundings,
    ) -> None:
        """``begin`` starts the part of the node that has this rank in a round."""
        self._life = (node, incarnation)
        self._store = store
        self._clock = clock
        self._mingle = mingle
        self._begin = begin
        self._around = around
        self._reported = False
        self._unsent: list[NodeExit] = []
        self._notice: PreemptionNotice | None = None
        self._leave_by = 0.0
        self.work: W | None = None
        self.ticked_at = clock.monotonic()
        """When the bucket was last read, by the monotonic clock."""

    @property
    def notice(self) -> PreemptionNotice | None:
        return self._notice

    @property
    def left_s(self) -> float:
        """Until the node is taken; only after a notice."""
        return self._leave_by - self._clock.monotonic()

    def take_notice(self, lead_s: float, source: str) -> None:
        """The node will be taken in ``lead_s`` seconds. The first word counts."""
        if self._notice is None:
            self._leave_by = self._clock.monotonic() + lead_s
            self._notice = PreemptionNotice(lead_s=lead_s, at=self._clock.time(), source=source)
            self._around.wake()

    def turn(self) -> None:
        """Raises ``GpuctlError``, if the bucket cannot be had: the next turn goes on from there."""
        if self._notice is not None and not self._around.told_of_notice:
            self._tell()
        decided = self._mingle.tick()
        self.ticked_at = self._clock.monotonic()
        if decided:
            self._tell()
        self._obey()
        self._report()

    def may_leave(self) -> bool:
        if self._notice is None:
            return False
        if self.left_s < 0:
            return True
        return self.work is None and not self._unsent and self._around.told_of_notice and not self._wanted()

    def _tell(self) -> None:
        """What is new here, to all who should look."""
        self._around.send_heartbeat()
        self._around.poke()

    def _obey(self) -> None:
        """Have the one run that the newest rounds ask of this node, and no other."""
        wanted = self._wanted()
        work = self.work
        if work and (wanted is None or not work.is_of(wanted)):
            ended = work.exit
            if ended is None:
                work.kill()
                return  # its end wakes the loop, and one run at a time
            work.end()
            if not self._reported:
                self._unsent.append(self._with_notice(ended))
            work = self.work = None
        if wanted and wanted.phase == "run" and work is None:
            rank = wanted.rank_of(*self._life)
            assert rank is not None
            self._reported = False
            self.work = self._begin(wanted, rank)
        elif wanted and wanted.phase == "drain" and work and work.exit is None:
            work.ask_to_stop(wanted)

    def _wanted(self) -> Round | None:
        rounds = (version.value for version in self._mingle.jobs.values())
        return next(
            (r for r in rounds if r and r.phase in ("run", "drain") and r.rank_of(*self._life) is not None), None
        )

    def _report(self) -> None:
        """Send the exit of a run that ended, its last words before it."""
        ended = self.work.exit if self.work else None
        if self.work and ended and not self._reported:
            self._reported = True
            if ended.status != "stopped":
                self.work.send_last_words()
            self._unsent.append(self._with_notice(ended))
        while self._unsent:
            node_exit = self._unsent[0]
            key = layout.node_exit(node_exit.job, node_exit.round, node_exit.node)
            self._store.put(key, encode(node_exit))
            del self._unsent[0]
            self._around.say(f"{node_exit.job} round {node_exit.round}: {node_exit.status}")
            self._around.poke()
            self._around.wake()  # if this is rank 0 itself, it has something to decide

    def _with_notice(self, node_exit: NodeExit) -> NodeExit:
        if self._notice is None:
            return node_exit
        return replace(node_exit, notice=self._notice, left_s=round(self.left_s, 3))
