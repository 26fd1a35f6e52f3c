"""``gpuctl demo``: the whole promise on one machine, checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import gpuctl
from gpuctl.cli.terminal import out, say
from gpuctl.cli.timeline import Point, Stretch, redone, stretches
from gpuctl.cluster import jobs, layout
from gpuctl.cluster.bucket import Bucket, open_bucket
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.packing import packed, survey, upload
from gpuctl.cluster.records import NodeExit, NodeRecord, Round, decode
from gpuctl.cluster.streams import StreamReader
from gpuctl.stacks.known import KnownCluster, known_clusters
from gpuctl.stacks.provider import Provider, UpRequest, provider

_NAME = "demo"
_PATIENCE_S = 120.0
_REPLACE_AFTER_S = 1.0
_INTERVAL = 100
"""Steps between two checkpoints: what a kill may cost at most."""
_ACCURACY_TOLERANCE = 0.01
"""Both runs see the same batches in the same order; only the order of additions differs with the number of nodes."""


def demo(
    steps: Annotated[int, typer.Option(min=1000, help="Optimizer steps of each run.")] = 2000,
    picture: Annotated[Path, typer.Option(help="Where to put the picture.")] = Path("demo.png"),
) -> None:
    """Train on four local nodes and lose two of them on the way."""
    _require("torch", "sklearn", "matplotlib")
    began = time.monotonic()
    local = provider("local")
    for leftover in (cluster for cluster in known_clusters() if cluster.name == _NAME):
        local.down(leftover, lambda line: None)  # noqa: ARG005 - of a demo that was interrupted
    cluster = local.up(UpRequest(name=_NAME, nodes_min=2, nodes_max=4), lambda line: None)  # noqa: ARG005
    show = _Show(cluster, local, open_bucket(cluster.bucket), began)
    try:
        show.tell("four nodes are up, each a process with its own address on this machine")
        calm = show.train_undisturbed(steps)
        rough = show.train_while_nodes_go(steps)
        show.print_timeline(rough)
        problems = _problems(calm, rough)
        _draw(picture, calm, rough)
    finally:
        left = local.down(cluster, lambda line: None)  # noqa: ARG005
    show.tell("down: " + ("every process is gone" if not left else f"still there: {', '.join(left)}"))
    problems += left
    result = (
        f"accuracy={rough.accuracy:.4f} undisturbed={calm.accuracy:.4f}"
        f" steps_redone_notice={rough.notice.redone} steps_redone_kill={rough.kill.redone}"
        f" resume_s_notice={rough.notice.resume_s:.2f} resume_s_kill={rough.kill.resume_s:.2f}"
    )
    if problems:
        out(f"demo: failed {result}")
        raise GpuctlError("the demo did not go as it should: " + "; ".join(problems), "please report this")
    out(f"demo: ok {result}")


@dataclass(slots=True)
class _Loss:
    """A node taken away, and what it cost."""

    node: str = ""
    at: float = 0.0
    round: int = 0
    redone: int = -1
    resume_s: float = -1.0


@dataclass(slots=True)
class _Run:
    job: str
    points: list[Point] = field(default_factory=list)
    lived: list[Stretch] = field(default_factory=list)
    accuracy: float = 0.0
    notice: _Loss = field(default_factory=_Loss)
    kill: _Loss = field(default_factory=_Loss)


class _Show:
    """The demo's two runs on one cluster."""

    def __init__(self, cluster: KnownCluster, local: Provider, bucket: Bucket, began: float) -> None:
        self._cluster = cluster
        self._local = local
        self._bucket = bucket
        self._began = began

    def tell(self, line: str) -> None:
        say(f"{time.monotonic() - self._began:6.1f} s  {line}")

    def train_undisturbed(self, steps: int) -> _Run:
        run = self._submit(steps)
        self.tell(f"{run.job}: learning 1,797 handwritten digits, undisturbed")
        self._finish(run)
        self.tell(f"{run.job}: test accuracy {run.accuracy:.4f}")
        return run

    def train_while_nodes_go(self, steps: int) -> _Run:
        run = self._submit(steps)
        self.tell(f"{run.job}: the same again, while nodes are taken away")
        self._wait(lambda: self._step(run) >= steps // 5, f"step {steps // 5}", run)
        run.notice = self._take(run, self._rank0(), notice_s=30.0)
        back = self._wait(lambda: self._full_round(run, after=run.notice.round), "four nodes again", run)
        self._wait(lambda: self._step(run, back) >= steps * 3 // 5, f"step {steps * 3 // 5}", run)
        other = self._wait(self._node_other_than_rank0, "a node to take", run)
        run.kill = self._take(run, other, notice_s=0.0)
        self._finish(run)
        self._reckon(run)
        self.tell(f"{run.job}: test accuracy {run.accuracy:.4f}")
        return run

    def print_timeline(self, run: _Run) -> None:
        began = run.lived[0].first.at
        out(f"{'round':>5}  {'at':>7}  {'nodes':>5}  {'steps':>12}  {'redone':>6}  why")
        for before, stretch in zip([None, *run.lived], run.lived, strict=False):
            again = str(redone(before, stretch)) if before else "-"
            span = f"{stretch.first.step}-{stretch.last_step}"
            at = f"{stretch.first.at - began:.1f} s"
            out(f"{stretch.number:>5}  {at:>7}  {stretch.nodes:>5}  {span:>12}  {again:>6}  {stretch.reason}")

    # -- one run ------------------------------------------------------------------------------------------------------

    def _submit(self, steps: int) -> _Run:
        folder = _examples()
        with packed(survey(folder)) as code:
            upload(self._bucket, code)
            request = jobs.Request(
                script="digits.py",
                args=("--steps", str(steps), "--checkpoint-every", str(_INTERVAL)),
                code=code.digest,
            )
            return _Run(jobs.submit(self._bucket, jobs.cluster_spec(self._bucket), request).job)

    def _take(self, run: _Run, node: str, notice_s: float) -> _Loss:
        current = self._current(run)
        loss = _Loss(node=node, at=time.time(), round=current.number)
        how = f"{notice_s:.0f} s of notice" if notice_s else "no notice"
        role = "rank 0's node" if node == self._rank0() else "a node"
        self.tell(f"{run.job}: step {self._step(run)}: {role}, {node}, is taken with {how}")
        self._local.preempt(self._cluster, node, notice_s, _REPLACE_AFTER_S, lambda line: self.tell(f"  {line}"))
        return loss

    def _finish(self, run: _Run) -> None:
        self._wait(lambda: self._has_ended(run), f"{run.job} to end")
        for round_, _, line in StreamReader(self._bucket, layout.metrics(run.job)).read():
            run.accuracy = line.get("accuracy") or run.accuracy
            if "loss" in line:
                run.points.append(Point(round_, line["step"], line["at"], line["loss"]))
        history = [version.value for version in jobs.rounds(self._bucket, run.job).history() if version.value]
        run.lived = stretches(history, self._exits(run, history), run.points)

    def _reckon(self, run: _Run) -> None:
        """What each loss cost: from its round's last step to the next one's first; a kill counts from its moment."""
        for loss, from_its_moment in ((run.notice, False), (run.kill, True)):
            after = [stretch for stretch in run.lived if stretch.number > loss.round]
            before = [stretch for stretch in run.lived if stretch.number <= loss.round]
            if after and before:
                loss.redone = redone(before[-1], after[0])
                loss.resume_s = after[0].first.at - (loss.at if from_its_moment else before[-1].last_at)

    def _exits(self, run: _Run, history: list[Round]) -> list[NodeExit]:
        numbers = {round_.number for round_ in history}
        keys = [entry.key for number in numbers for entry in self._bucket.list(layout.exits(run.job, number))]
        return [decode(data, NodeExit, key) for key in keys if (data := self._bucket.get(key))]

    # -- looking ------------------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], Any], what: str, run: _Run | None = None) -> Any:
        """For what happens while ``run`` lasts."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            if run and self._has_ended(run):
                raise GpuctlError(f"{run.job} ended before there was {what}", "a busy machine needs more --steps")
            if time.monotonic() > deadline:
                raise GpuctlError(f"waited {_PATIENCE_S:g} s in vain for {what}", "is this machine very busy?")
            time.sleep(0.05)
        return found

    def _has_ended(self, run: _Run) -> bool:
        """Raises ``GpuctlError`` if not well."""
        ended = jobs.outcome(self._bucket, run.job)
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

    def _step(self, run: _Run, round_: int | None = None) -> int:
        told = (node.progress for node in self._nodes() if node.progress and node.progress.job == run.job)
        return max((p.step for p in told if round_ is None or p.round >= round_), default=0)

    def _current(self, run: _Run) -> Round:
        current = jobs.rounds(self._bucket, run.job).read().value
        assert current is not None
        return current

    def _full_round(self, run: _Run, after: int) -> int | None:
        current = self._current(run)
        full = current.phase == "run" and current.number > after and len(current.members) == 4
        return current.number if full else None


def _problems(calm: _Run, rough: _Run) -> list[str]:
    """What did not go as promised."""
    found = []
    if abs(calm.accuracy - rough.accuracy) > _ACCURACY_TOLERANCE:
        found.append(f"accuracy {rough.accuracy:.4f} is not that of the undisturbed run, {calm.accuracy:.4f}")
    if rough.notice.redone != 0:
        found.append(f"{rough.notice.redone} steps were made twice after the notice")
    if not 0 <= rough.kill.redone <= _INTERVAL:
        found.append(f"{rough.kill.redone} steps were made twice after the kill: more than one interval of {_INTERVAL}")
    if len(calm.lived) != 1:
        found.append(f"the undisturbed run took {len(calm.lived)} rounds")
    return found


def _draw(path: Path, calm: _Run, rough: _Run) -> None:
    from gpuctl.cli.picture import draw  # matplotlib takes a second to import

    draw(path, calm.points, rough.points, rough.lived, "Handwritten digits on four nodes, two of them lost")
    say(f"picture: {path}")


def _require(*modules: str) -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise BadInput(f"the demo needs {', '.join(missing)}", "pip install 'gpuctl[demo]'")


def _examples() -> Path:
    """The folder with ``digits.py``: in the package, or beside it in a checkout."""
    package = Path(gpuctl.__file__).parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / "digits.py").exists():
            return folder
    raise BadInput("the examples are not installed", "run the demo in a checkout of gpuctl")
