"""The demo's two runs of one job: one that is left alone, and one whose nodes go."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpuctl
from gpuctl.cli.render.job.timeline import Point, RoundSpan, redone, round_spans
from gpuctl.cli.render.terminal import number, out, say
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.jobs.code_archive import packed, upload
from gpuctl.cluster.jobs.code_survey import survey
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import NodeExit, Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.streams import StreamReader
from gpuctl.stacks.providers.interface import Dialog
from gpuctl.stacks.providers.local import LocalProvider
from gpuctl.stacks.state.clusters import KnownCluster

_PATIENCE_S = 120.0
"""Without a step, a round, or an end."""
_REPLACE_AFTER_S = 1.0
_SCRIPT = "demo_digits.py"
INTERVAL = 100
"""Steps between two checkpoints: what a kill may cost at most."""


@dataclass(slots=True)
class Loss:
    """A node taken away, and what it cost."""

    node: str = ""
    at: float = 0.0
    round: int = 0
    redone: int = -1
    resume_s: float = -1.0


@dataclass(slots=True)
class DemoRun:
    job: str
    points: list[Point] = field(default_factory=list)
    lived: list[RoundSpan] = field(default_factory=list)
    accuracy: float = 0.0
    notice: Loss = field(default_factory=Loss)
    kill: Loss = field(default_factory=Loss)


@dataclass(frozen=True, slots=True)
class StepGates:
    """Steps at which the workers stand still until they are let go: see ``demo_digits``."""

    folder: Path

    def set(self, *steps: int) -> None:
        self.folder.mkdir(exist_ok=True)
        for step in steps:
            (self.folder / str(step)).touch()

    def release(self, step: int) -> None:
        (self.folder / str(step)).unlink(missing_ok=True)


class DemoRuns:
    """The demo's two runs on one cluster."""

    def __init__(self, cluster: KnownCluster, holds: StepGates, began: float) -> None:
        self._cluster = cluster
        self._bucket: Bucket = open_bucket(cluster.bucket)
        self._holds = holds
        self._began = began

    def tell(self, line: str) -> None:
        say(f"{time.monotonic() - self._began:6.1f} s  {line}")

    def train_undisturbed(self, steps: int) -> DemoRun:
        run = self._submit(steps)
        self.tell(f"{run.job}: learning 1,797 handwritten digits, undisturbed")
        self._finish(run)
        self.tell(f"{run.job}: test accuracy {run.accuracy:.4f}")
        return run

    def train_while_nodes_go(self, steps: int) -> DemoRun:
        """The workers stand still at four steps until what is to be seen there has happened."""
        notice, full, kill, end = (steps * fifth // 5 for fifth in (1, 2, 3, 4))
        saved = kill - kill % INTERVAL
        kill = saved + INTERVAL // 2  # what it costs on average
        self._holds.set(notice, full, kill, end)
        run = self._submit(steps)
        self.tell(f"{run.job}: the same again, while nodes are lost")
        self._wait(lambda: self._step(run) >= notice, f"step {notice}", run)
        run.notice = self._take(run, self._rank0(), notice_s=30.0, hold=notice)
        back = self._wait(lambda: self._full_round(run, after=run.notice.round), "four nodes again", run)
        self._holds.release(full)
        self._wait(lambda: self._step(run, back) >= kill, f"step {kill}", run)
        self._wait(lambda: self._saved_step(run) >= saved, f"the checkpoint of step {saved}", run)
        other = self._wait(self._node_other_than_rank0, "a node to take", run)
        run.kill = self._take(run, other, notice_s=0.0, hold=kill)
        self._wait(lambda: self._full_round(run, after=run.kill.round), "four nodes again", run)
        self._holds.release(end)
        self._finish(run)
        self._reckon(run)
        self.tell(f"{run.job}: test accuracy {run.accuracy:.4f}")
        return run

    def print_timeline(self, run: DemoRun) -> None:
        began = run.lived[0].first.at
        out(f"{'round':>5}  {'at':>7}  {'nodes':>5}  {'steps':>12}  {'steps/s':>7}  {'redone':>6}  why")
        for before, this in zip([None, *run.lived], run.lived, strict=False):
            again = str(redone(before, this)) if before else "-"
            span, rate = f"{this.first.step}-{this.last_step}", number(this.steps_per_s)
            at = f"{this.first.at - began:.1f} s"
            out(f"{this.number:>5}  {at:>7}  {this.nodes:>5}  {span:>12}  {rate:>7}  {again:>6}  {this.reason}")

    # -- one run ------------------------------------------------------------------------------------------------------

    def _submit(self, steps: int) -> DemoRun:
        with _code() as folder, packed(survey(folder)) as code:
            upload(self._bucket, code)
            request = queue.JobRequest(
                script=_SCRIPT,
                args=("--steps", str(steps), "--checkpoint-every", str(INTERVAL)),
                env=(("DEMO_HOLDS", str(self._holds.folder)),),
                code=code.digest,
            )
            return DemoRun(queue.submit(self._bucket, queue.cluster_spec(self._bucket), request).job)

    def _take(self, run: DemoRun, node: str, notice_s: float, hold: int) -> Loss:
        """Take ``node`` while the workers stand still at step ``hold``, and then let them go."""
        loss = Loss(node=node, round=self._current(run).number)
        how = f"{notice_s:.0f} s of notice" if notice_s else "no notice"
        role = "rank 0's node" if node == self._rank0() else "a node"
        self.tell(f"{run.job}: step {self._step(run)}: {role}, {node}, is lost with {how}")

        def said(line: str) -> None:
            if not loss.at:  # it has its notice, or is gone
                loss.at = time.time()
                self._holds.release(hold)
            self.tell(f"  {line}")

        LocalProvider("local", Dialog(said)).preempt(self._cluster, node, notice_s, _REPLACE_AFTER_S)
        return loss

    def _finish(self, run: DemoRun) -> None:
        self._wait(lambda: self._has_ended(run), f"{run.job} to end", run, lasting=False)
        for round_, _, line in StreamReader(self._bucket, layout.metrics(run.job)).read():
            run.accuracy = line.get("accuracy") or run.accuracy
            if "loss" in line:
                run.points.append(Point(round_, line["step"], line["at"], line["loss"]))
        history = [version.value for version in ledgers.rounds(self._bucket, run.job).history() if version.value]
        run.lived = round_spans(history, self._exits(run, history), run.points)

    def _reckon(self, run: DemoRun) -> None:
        """Reckon what each loss cost: a notice, or a kill, counts from its moment to the next round's first step."""
        for loss in (run.notice, run.kill):
            after = [round_span for round_span in run.lived if round_span.number > loss.round]
            before = [round_span for round_span in run.lived if round_span.number <= loss.round]
            if after and before:
                loss.redone = redone(before[-1], after[0])
                loss.resume_s = after[0].first.at - max(loss.at, before[-1].last_at)

    def _exits(self, run: DemoRun, history: list[Round]) -> list[NodeExit]:
        numbers = {round_.number for round_ in history}
        keys = [entry.key for number in numbers for entry in self._bucket.list(layout.exits(run.job, number))]
        return [decode(data, NodeExit, key) for key in keys if (data := self._bucket.get(key))]

    # -- looking ------------------------------------------------------------------------------------------------------

    def _wait(
        self, condition: Callable[[], Any], what: str, run: DemoRun | None = None, *, lasting: bool = True
    ) -> Any:
        """Wait for a condition while ``run`` lasts, however slow the machine is, as long as anything happens at all."""
        news, deadline = None, time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            if run and lasting and self._has_ended(run):
                raise GpuctlError(f"{run.job} ended before there was {what}", "please report this")
            if run and (now := self._news(run)) != news:
                news, deadline = now, time.monotonic() + _PATIENCE_S
            if time.monotonic() > deadline:
                raise GpuctlError(
                    f"timed out after {_PATIENCE_S:g} s waiting for {what}", "is this machine overloaded?"
                )
            time.sleep(0.05)
        return found

    def _news(self, run: DemoRun) -> tuple[int, int]:
        """Other than before if ``run`` has got on."""
        return ledgers.rounds(self._bucket, run.job).read().number, self._step(run)

    def _has_ended(self, run: DemoRun) -> bool:
        """Raises ``GpuctlError`` if not well."""
        ended = queue.outcome(self._bucket, run.job)
        if ended and ended.result != "succeeded":
            raise GpuctlError(f"{run.job} failed: {ended.message}", ended.traceback)
        return ended is not None

    def _nodes(self) -> list[NodeRecord]:
        keys = [entry.key for entry in self._bucket.list(layout.NODES)]
        return [decode(data, NodeRecord, key) for key in keys if (data := self._bucket.get(key))]

    def _rank0(self) -> str:
        return str(self._wait(lambda: next((n.node for n in self._nodes() if n.view), None), "a rank 0"))

    def _node_other_than_rank0(self) -> str | None:
        rank0 = self._rank0()
        running = (node.node for node in self._nodes() if node.node != rank0 and node.progress)
        return next(running, None)

    def _step(self, run: DemoRun, round_: int | None = None) -> int:
        told = (node.progress for node in self._nodes() if node.progress and node.progress.job == run.job)
        return max((p.step for p in told if round_ is None or p.round >= round_), default=0)

    def _saved_step(self, run: DemoRun) -> int:
        log = ledgers.checkpoints(self._bucket, run.job).read().value
        return max((entry.step for entry in log.entries), default=-1) if log else -1

    def _current(self, run: DemoRun) -> Round:
        current = ledgers.rounds(self._bucket, run.job).read().value
        assert current is not None
        return current

    def _full_round(self, run: DemoRun, after: int) -> int | None:
        current = self._current(run)
        full = current.phase == "run" and current.number > after and len(current.members) == 4
        return current.number if full else None


@contextlib.contextmanager
def _code() -> Iterator[Path]:
    """The folder that the demo's jobs get: the example, and what makes it stand still."""
    with tempfile.TemporaryDirectory(prefix="gpuctl-") as folder:
        for path in (_examples() / "digits.py", Path(__file__).with_name(_SCRIPT)):
            shutil.copy(path, folder)
        yield Path(folder)


def _examples() -> Path:
    """The folder with ``digits.py``: in the package, or beside it in a checkout."""
    package = Path(gpuctl.__file__).parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / "digits.py").exists():
            return folder
    raise BadInput("the examples are not installed", "run the demo in a checkout of gpuctl")
