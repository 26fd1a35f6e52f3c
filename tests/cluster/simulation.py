"""A cluster in one process, under one fake clock, whose nodes can be stopped between any two requests to the store.

Each part of a node (its loop, its heartbeat, the worker that commits checkpoints) is a thread that runs only while it
holds the baton; it gives the baton back at a request once its budget is used up. So a test decides about every
interleaving, a frozen node goes on later exactly where it was, and the same decisions give the same run.

Each node has a ``bootstrap.reconcile.Reconciler``, as the agent has; ``Rules`` checks all that lands in the store.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from gpuctl.bootstrap.agent.reconcile import Reconciler
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import LedgerEntry
from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.membership.failure_detector import PeerState
from gpuctl.cluster.membership.mingle import Mingle
from gpuctl.cluster.membership.rounds import RoundPolicy
from gpuctl.cluster.records.checkpoints import CheckpointEntry, CheckpointIndex
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord, PreemptionNotice, Rank0
from gpuctl.cluster.records.rounds import NodeExit, RankExit, Round
from gpuctl.cluster.storage.interface import Entry

T = TypeVar("T")
Life = tuple[str, str]

SPEC = ClusterSpec(name="sim", provider="sim", nodes_min=1, nodes_max=8)
POLICY = RoundPolicy(drain_s=4.0, late_s=1.0, cold_s=4.0, unsure_s=2.5 * SPEC.lease_s)
ENOUGH = 1_000_000
STEPS = 12
"""Optimizer steps of every job; each ends with a checkpoint."""
STEP_S = 0.4
WARM_S = 2.0
"""Until a new node's interpreter is up."""

Spoil = Literal["ok", "cut", "mute", "late", "pause", "freeze", "die"]
"""What becomes of a request: nothing special; it never gets there; it gets there and the answer is lost; the answer is
lost and a write lands at some later time; the task stops between the store's answer and its next line of code; the node
freezes on the point of sending it; the node dies after sending it."""


class Crashed(BaseException):
    """Ends a thread of a node that is no more."""


class Task:
    """A thread that runs while it has the baton: ``go`` gives it, and returns when it comes back."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self.name = name
        self.wake_at = 0.0
        self.done = False
        self.error: BaseException | None = None
        self._body = body
        self._budget = 0
        self._killed = False
        self._resume = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def go(self, budget: int = ENOUGH) -> None:
        if not self.done:
            self._budget = budget
            self._resume.release()
            self._back.acquire()

    def end(self) -> None:
        self._killed = True
        self.go()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def request(self) -> None:
        """Called by the task itself, before each request."""
        self._budget -= 1
        if self._budget < 0:
            self.pause()

    def sleep_until(self, at: float) -> None:
        self.wake_at = at
        self.pause()

    def pause(self) -> None:
        self._back.release()
        self._resume.acquire()
        if self._killed:
            raise Crashed

    def _run(self) -> None:
        _own.task = self
        self._resume.acquire()
        try:
            if not self._killed:
                self._body()
        except Crashed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the simulation, in the test's thread
            self.error = error
        self.done = True
        self._back.release()


_own = threading.local()


class Simulation:
    """The clock, the store's content, the nodes, and what direct contact would tell of them."""

    def __init__(self, names: Sequence[str], *, contact: bool = True) -> None:
        self.contact = contact
        """Nodes can ask each other directly."""
        self.now = 0.0
        self.files: dict[str, tuple[bytes, int]] = {}
        self.nodes: dict[str, Node] = {}
        self.lives: dict[Life, Node] = {}
        self.lies: dict[tuple[str, str], PeerState] = {}
        self.full = False
        """The store takes nothing new."""
        self.late: list[Callable[[], Any]] = []
        self.worlds: dict[tuple[str, int], World] = {}
        self.jobs: dict[str, JobSpec] = {}
        self.plain: set[str] = set()
        self.holding = False
        """Jobs do not come to their end."""
        self.rules = Rules(self)
        self.log: list[str] = []
        self.asked: Counter[tuple[str, str]] = Counter()
        """Requests so far, by node and key."""
        self._writes = 0
        for name in names:
            self.start(name)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def say(self, who: str, what: str) -> None:
        self.log.append(f"{self.now:7.2f} {who}: {what}")

    # -- what a test does ---------------------------------------------------------------------------------------------

    def submit(self, least: int, most: int, *, restarts: int = 0, plain: bool = False) -> str:
        number = len(self.jobs) + 1
        spec = JobSpec(
            job=f"job-{number}",
            number=number,
            script="train.py",
            nodes_min=least,
            nodes_max=most,
            max_restarts=restarts,
        )
        self.jobs[spec.job] = spec
        if plain:
            self.plain.add(spec.job)
        self.write(layout.job_spec(spec.job), encode(spec))
        self.write(
            f"{layout.QUEUE}/{number:012d}", encode(LedgerEntry("user", msgspec.Raw(msgspec.json.encode(spec.job))))
        )
        self.say("user", f"submits {spec.job} for {least}:{most} nodes, {restarts} restarts{' plain' * plain}")
        return spec.job

    def unfinished(self) -> list[str]:
        newest = [(job, self.rules.newest(job)) for job in self.jobs]
        return [job for job, now in newest if now is None or now.phase != "ended"]

    def cancel(self, job: str) -> None:
        self.say("user", f"cancels {job}")
        self.rules.cancelled.add(job)
        self.write(layout.cancel(job), b"{}")

    def start(self, name: str) -> Node:
        """A new life of a node that is away."""
        life = sum(other == name for other, _ in self.lives)
        node = self.nodes[name] = Node(self, name, f"{name}{life}")
        self.lives[name, node.incarnation] = node
        self.say(name, f"starts as {node.incarnation}")
        return node

    def step(self, choice: int, budget: int) -> None:
        """One of the tasks that could run does, for some requests."""
        ready = [task for task in self._tasks() if task.wake_at <= self.now]
        if ready:
            self._go(ready[choice % len(ready)], budget)

    def pass_time(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Everybody who is not frozen does what is due; ``True`` once ``until`` holds."""
        end = self.now + seconds
        while not until():
            for _ in range(200):
                ready = [task for task in self._tasks() if task.wake_at <= self.now]
                if not ready:
                    break
                for task in ready:
                    self._go(task, ENOUGH)
            else:
                self._fail(AssertionError("the nodes never come to rest"))
            following = min((task.wake_at for task in self._tasks()), default=end)
            if following >= end:
                self.now = end
                return until()
            self.now = max(self.now, following)
        return True

    def heal(self, needed: int) -> None:
        """All faults end, and a cloud replaces what is gone as far as it is needed."""
        self.say("sim", "all faults end")
        self.lies.clear()
        self.land_late()
        for node in self.nodes.values():
            node.frozen_at = None
            node.plan.clear()
            node.base = "ok"
            node.traps.clear()
        alive = [node for node in self.nodes.values() if node.alive and node.notice is None]
        away = [node.name for node in self.nodes.values() if node not in alive]
        for name in away[: max(0, needed - len(alive))]:
            self.nodes[name].crash()
            self.start(name)

    def land_late(self) -> None:
        for land in self.late:
            land()
        self.late.clear()

    def close(self) -> None:
        for node in self.lives.values():
            node.crash()

    def fail(self, what: str) -> None:
        self._fail(AssertionError(what))

    def _tasks(self) -> list[Task]:
        return [t for n in self.nodes.values() if n.alive and n.frozen_at is None for t in n.tasks if not t.done]

    def _go(self, task: Task, budget: int) -> None:
        task.go(budget)
        for node in self.nodes.values():
            for other in node.tasks:
                if other.error:
                    self._fail(other.error)
            if node.dying and node.alive:
                self.say(node.name, "dies")
                node.crash()

    def _fail(self, error: BaseException) -> None:
        error.add_note("\n".join(self.log[-200:]))
        raise error

    # -- the store ----------------------------------------------------------------------------------------------------

    def write(self, key: str, data: bytes, writer: Life | None = None) -> None:
        self._writes += 1
        self.files[key] = (data, self._writes)
        self.rules.landed(key, data, writer)

    def create(self, key: str, data: bytes, writer: Life | None) -> bool:
        if key in self.files:
            return False
        self.write(key, data, writer)
        return True


class NodeStore:
    """The store as one node reaches it. ``Node.plan`` says what becomes of its next requests."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._sim = node.sim

    def get(self, key: str) -> bytes | None:
        return self._ask(key, lambda: self._sim.files.get(key, (None, 0))[0])

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def put(self, key: str, data: bytes) -> None:
        self._ask(key, lambda: self._sim.write(key, data, self._node.life), write=True)

    def create(self, key: str, data: bytes) -> bool:
        return self._ask(key, lambda: self._sim.create(key, data, self._node.life), write=True)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        def look() -> list[Entry]:
            keys = sorted(k for k in self._sim.files if k.startswith(f"{prefix}/") and (after is None or k > after))
            return [Entry(k, len(self._sim.files[k][0]), str(self._sim.files[k][1]), 0.0) for k in keys]

        return self._ask(prefix, look)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ask(key, lambda key=key: self._sim.files.pop(key, None), write=True)  # type: ignore[misc]

    def _ask(self, key: str, answer: Callable[[], T], *, write: bool = False) -> T:
        _own.task.request()
        node = self._node
        self._sim.asked[node.name, key] += 1
        spoil = self._spoil(key, write)
        if spoil == "freeze":
            node.freeze()
            _own.task.pause()
        if spoil in ("mute", "die") or (spoil == "late" and not write):
            answer()
        elif spoil == "late":
            self._sim.late.append(answer)
        if spoil == "die":
            node.dying = True
            _own.task.pause()
        if spoil in ("cut", "mute", "late"):
            raise StoreUnavailable(f"the store does not respond ({spoil})")
        found = answer()
        if spoil == "pause":
            _own.task.pause()
        return found

    def _spoil(self, key: str, write: bool) -> Spoil:
        node = self._node
        if write and self._sim.full:
            return "cut"
        if write:
            for part in [part for part in node.traps if part in key]:
                self._sim.say(node.name, f"{node.traps[part]} at {key}")
                return node.traps.pop(part)
        elif node.blind_for and node.blind_for in key:
            return "cut"
        return node.plan.pop(0) if node.plan else node.base


class Contact:
    """What direct contact tells ``node``: the truth, unless a test lies."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def of(self, node: str, incarnation: str) -> PeerState:
        sim = self._node.sim
        if (self._node.name, node) in sim.lies:
            return sim.lies[self._node.name, node]
        if not sim.contact:
            return "unknown"
        other = sim.lives.get((node, incarnation))
        if other is None or not other.alive:
            return "gone"
        since = other.frozen_at
        return "silent" if since is not None and sim.now - since > SPEC.lease_s else "up"

    def attend(self, records: Iterable[NodeRecord]) -> None: ...


@dataclass
class World:
    """The workers of one round: they make steps while all members have theirs, and break together."""

    round: Round
    runs: dict[Life, Run] = field(default_factory=dict)
    end: Literal["", "completed", "drained", "broken"] = ""

    def is_whole(self) -> bool:
        return len(self.runs) == len(self.round.members) and all(r.node.frozen_at is None for r in self.runs.values())

    def finish(self, end: Literal["completed", "drained", "broken"]) -> None:
        self.end = self.end or end
        for run in self.runs.values():
            run.node.wake()


@dataclass
class Run:
    """A node's part in a round."""

    node: Node
    round: Round
    world: World
    asked: bool = False
    fails: bool = False
    give_up_at: float | None = None
    ended: NodeExit | None = None
    task: Task | None = None

    @property
    def exit(self) -> NodeExit | None:
        self._look()
        return self.ended

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def ask_to_stop(self, round_: Round) -> None:
        self.asked = True
        self.give_up_at = self.give_up_at or self.node.sim.now + round_.drain_s
        if self.node.sim.now > self.give_up_at:
            self.kill()

    def kill(self) -> None:
        self.finish("stopped")
        self.node.wake()

    def send_last_words(self) -> None: ...

    def end(self) -> None: ...

    def finish(self, status: Literal["completed", "drained", "failed", "stopped"], why: str = "") -> None:
        if self.ended:
            return
        rank = self.round.rank_of(*self.node.life)
        assert rank is not None
        ranks = (RankExit(rank=rank, local_rank=0, exit_code=1, message=why, at=self.node.sim.now),) if why else ()
        self.ended = NodeExit(
            job=self.round.job,
            round=self.round.number,
            node=self.node.name,
            incarnation=self.node.incarnation,
            status=status,
            ranks=ranks,
            at=self.node.sim.now,
        )
        if self.task:
            self.task.end()
        if status in ("failed", "stopped"):
            self.world.finish("broken")

    def _look(self) -> None:
        """See how the workers are."""
        if self.ended is None and self.fails:
            self.finish("failed", "ValueError: the script's own fault")
        elif self.ended is None and self.world.end == "broken":
            self.finish("failed", "Connection closed by peer")
        elif self.ended is None and self.world.end:
            self.finish(self.world.end)  # type: ignore[arg-type]

    def train(self) -> None:
        """Global rank 0's worker: raise the fence, restore, then steps and commits."""
        sim, number = self.node.sim, self.round.number
        ledger = ledgers.checkpoints(self.node.store, self.round.job)
        while not self.world.end:
            _own.task.sleep_until(sim.now + STEP_S)
            if not self.world.is_whole():
                continue
            try:
                version = ledger.read()
                log = version.value or CheckpointIndex()
                if log.fence > number:
                    return
                step = log.entries[-1].step if log.entries else 0
                if log.fence < number:
                    ledger.commit(replace(log, fence=number), version.number)
                    continue
                done = step >= STEPS and not sim.holding
                entry = CheckpointEntry(
                    digest="", written=0, step=step + 1, round=number, path=f"{step + 1}-r{number}", bytes=1, world=1
                )
                if not done and not ledger.commit(replace(log, entries=(*log.entries, entry)), version.number):
                    continue
            except StoreUnavailable:
                continue
            if done:
                self.world.finish("completed")
            elif self.asked and self.round.job not in sim.plain:
                self.world.finish("drained")


class Node:
    """One life of a node, from ``start`` to a crash or to its leaving after a notice."""

    def __init__(self, sim: Simulation, name: str, incarnation: str) -> None:
        self.sim = sim
        self.name = name
        self.incarnation = incarnation
        self.life = (name, incarnation)
        self.alive = True
        self.frozen_at: float | None = None
        self.plan: list[Spoil] = []
        self.base: Spoil = "ok"
        self.traps: dict[str, Spoil] = {}
        """What becomes of the next write to a key that contains this."""
        self.blind_for = ""
        """Reads of a key that contains this get no answer."""
        self.dying = False
        self.store = NodeStore(self)
        self.mingle = Mingle(self.store, sim, Contact(self), SPEC, self.record, POLICY)
        self._reconciler = Reconciler(name, incarnation, self.store, sim, self.mingle, self._begin, self)
        self.begun: dict[str, int] = {}
        self._ports = [1, 2, 3]
        self._beat = 0
        self._beating = False
        self.told_of_notice = False
        self._warm_at = sim.now + WARM_S
        self.loop = Task(f"{name} {incarnation}", self._serve)
        self._tasks = [self.loop]

    @property
    def run(self) -> Run | None:
        return self._reconciler.work

    @property
    def notice(self) -> PreemptionNotice | None:
        return self._reconciler.notice

    @property
    def tasks(self) -> list[Task]:
        return [*self._tasks, self.run.task] if self.run and self.run.task else self._tasks

    def crash(self) -> None:
        self.alive = False
        for task in self.tasks:
            task.end()
        if self.run and self.run.ended is None:
            self.run.world.finish("broken")

    def freeze(self) -> None:
        self.frozen_at = self.sim.now

    def warn(self, lead_s: float) -> None:
        self._reconciler.take_notice(lead_s, "the test")

    def fail_worker(self) -> None:
        if self.run and self.run.ended is None and not self.run.world.end:
            self.sim.rules.faults.setdefault(self.run.round.job, set()).add(self.run.round.number)
            self.run.fails = True
            self.wake()

    def record(self) -> NodeRecord:
        training = self.run is not None and self.run.ended is None and self.run.round.job not in self.sim.plain
        return NodeRecord(
            node=self.name,
            incarnation=self.incarnation,
            beat=self._beat,
            address=self.name,
            port=1,
            spare_ports=tuple(self._ports[-3:]),
            ready=self.sim.now >= self._warm_at,
            notice=self.notice,
            drainable=training,
        )

    # -- as the agent does --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._beat:
            self._try(self.send_heartbeat)
            self.loop.sleep_until(self.sim.now + 0.2)
        self._tasks.append(Task(f"{self.name} heartbeat", self._beat_regularly))
        while not self._reconciler.may_leave():
            self._try(self._turn)
            self.loop.sleep_until(self.sim.now + SPEC.heartbeat_s)
        self._try(lambda: self.store.delete([layout.node(self.name)]))
        self.alive = False
        self.sim.say(self.name, "has left")
        if self.run and self.run.ended is None:
            self.run.world.finish("broken")

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except StoreUnavailable as error:
            self.sim.say(self.name, error.message)

    def _turn(self) -> None:
        led = self.mingle.leads
        try:
            self._reconciler.turn()
        finally:
            if self.mingle.leads != led:
                self.say("leads no more" if led else f"leads, epoch {self.mingle.lease.epoch}")

    def _begin(self, round_: Round, rank: int) -> Run:
        assert round_.number > self.begun.get(round_.job, 0), f"{self.name} begins {round_} twice"
        self.begun[round_.job] = round_.number
        world = self.sim.worlds.setdefault((round_.job, round_.number), World(round_))
        run = world.runs[self.life] = Run(self, round_, world)
        self.say(f"begins {round_.job} round {round_.number}")
        if rank == 0:
            if round_.master_port not in self._ports:
                run.finish("stopped", "the port is gone")
                return run
            self._ports.remove(round_.master_port)
            self._ports.append(max([*self._ports, round_.master_port]) + 1)
            run.task = Task(f"{self.name} {round_.job} round {round_.number}", run.train)
        return run

    # -- see reconcile.Surroundings -----------------------------------------------------------------------------------

    def poke(self) -> None:
        for other in self.sim.nodes.values():
            if other.alive and other is not self and self.sim.contact and (self.name, other.name) not in self.sim.lies:
                other.wake()

    def wake(self) -> None:
        self.loop.wake_at = 0.0

    def say(self, line: str) -> None:
        self.sim.say(self.name, line)

    def send_heartbeat(self) -> None:
        while self._beating:
            _own.task.pause()
        self._beating = True
        try:
            self._beat += 1
            record = self.mingle.heartbeat(self._beat)
            self.store.put(layout.node(self.name), encode(record))
            self.told_of_notice = record.notice is not None
        finally:
            self._beating = False

    def _beat_regularly(self) -> None:
        while True:
            _own.task.sleep_until(self.sim.now + SPEC.heartbeat_s)
            if self.sim.now - self._reconciler.ticked_at < SPEC.lease_s:
                self._try(self.send_heartbeat)


class Rules:
    """What must hold, checked at every write that lands."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.rounds: dict[str, list[Round]] = {}
        self.holders: dict[int, Rank0] = {}
        self.logs: dict[str, list[CheckpointIndex]] = {}
        self.faults: dict[str, set[int]] = {}
        """Rounds of a job in which a test made a worker fail."""
        self.cancelled: set[str] = set()

    def landed(self, key: str, data: bytes, writer: Life | None) -> None:
        parts = key.split("/")
        if parts[0] == layout.RANK0 and self._is_next(key, len(self.holders), keep=16):
            holder = self.holders[int(parts[-1])] = self._entry(data, Rank0, key)
            assert (holder.node, holder.incarnation) == writer
        elif parts[0] == layout.JOBS and parts[2] == "rounds":
            entries = self.rounds.setdefault(parts[1], [])
            if self._is_next(key, len(entries), keep=256):
                self._round(parts[1], self._entry(data, Round, key), writer)
        elif parts[0] == layout.JOBS and parts[2] == "checkpoints":
            logs = self.logs.setdefault(parts[1], [])
            if self._is_next(key, len(logs), keep=64):
                self._log(parts[1], self._entry(data, CheckpointIndex, key))

    @staticmethod
    def _is_next(key: str, newest: int, *, keep: int) -> bool:
        """``False`` for a version that lands after it was pruned: nobody reads it."""
        version = int(key.rsplit("/", 1)[-1])
        if version <= newest - keep:
            return False
        assert version == newest + 1, f"{key} lands after version {newest}"
        return True

    def newest(self, job: str) -> Round | None:
        return self.rounds[job][-1] if self.rounds.get(job) else None

    def _entry(self, data: bytes, kind: type[T], key: str) -> T:
        return decode(decode(data, LedgerEntry, key).value, kind, key)

    def _round(self, job: str, new: Round, writer: Life | None) -> None:
        entries = self.rounds[job]
        who = ",".join(f"{m.incarnation}" for m in new.members)
        self._sim.say(
            writer[0] if writer else "user",
            f"writes {job} v{len(entries) + 1}: round {new.number} {new.phase} epoch {new.epoch} [{who}] {new.reason}"
            + (f" => {new.outcome.result}: {new.outcome.message}" if new.outcome else ""),
        )
        holder = self.holders[new.epoch]
        assert (holder.node, holder.incarnation) == writer, "who does not hold the lease decides"
        if entries:
            self._follows(entries[-1], new)
        entries.append(new)
        assert new.failures <= len(self.faults.get(job, ())), "the script is blamed for what the world did"
        if new.outcome:
            assert new.outcome.result != "cancelled" or job in self.cancelled
            assert new.outcome.result != "failed" or new.failures or new.outcome.exit_code == 2, (
                "failed without a failure"
            )
        if new.phase in ("run", "drain"):
            taken = {(m.node, m.incarnation) for m in new.members}
            assert len(taken) == len(new.members)
            for other in self.rounds.keys() - {job}:
                now = self.rounds[other][-1]
                held = {(m.node, m.incarnation) for m in now.members if now.phase in ("run", "drain")}
                assert not taken & held, f"a node is in two jobs at once: {taken & held}"

    @staticmethod
    def _follows(old: Round, new: Round) -> None:
        assert old.phase != "ended", "a job that ended goes on"
        assert new.epoch >= old.epoch, "a deposed rank 0 decides"
        assert new.failures >= old.failures
        assert new.number in (old.number, old.number + 1), "numbers go back, or skip one"
        world = (old.members, old.master_address, old.master_port)
        if new.number == old.number:
            assert world == (new.members, new.master_address, new.master_port), "two worlds share a number"
            order = ["wait", "run", "drain", "ended"]
            assert order.index(new.phase) >= order.index(old.phase), "a phase goes back"
        else:
            assert new.phase in ("run", "wait"), "a new world must begin"

    def _log(self, job: str, new: CheckpointIndex) -> None:
        logs = self.logs[job]
        old = logs[-1] if logs else CheckpointIndex()
        logs.append(new)
        assert new.fence >= old.fence, "the fence goes down"
        added = new.entries[len(old.entries) :]
        assert new.entries[: len(old.entries)] == old.entries
        for entry in added:
            assert entry.round == old.fence, f"round {entry.round} commits past the fence {old.fence}"
            self._sim.say("checkpoint", f"{job} step {entry.step} of round {entry.round}")
