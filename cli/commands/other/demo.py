"""``gpuctl demo``: the whole promise on one machine, checked."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from gpuctl.cli.commands.other.demo_runs import INTERVAL, DemoRun, DemoRuns, StepGates
from gpuctl.cli.render.terminal import out, say
from gpuctl.cli.settings.options import parse_flag, text_option, whole_number
from gpuctl.cli.signals import as_interrupts
from gpuctl.cluster.distribution import pip_install
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.providers.interface import Dialog, UpRequest
from gpuctl.stacks.providers.local import LocalProvider
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.paths import state_dir

_PICTURES = (".png", ".svg", ".pdf")
_ACCURACY_TOLERANCE = 0.01
"""Both runs see the same batches in the same order; only the order of additions differs with the number of nodes."""


def demo(
    steps: Annotated[
        str, text_option("--steps", metavar="N", about="Optimizer steps of each run (default: 2000).")
    ] = "2000",
    picture: Annotated[
        str, text_option("--picture", metavar="FILE", about="File for the picture (default: demo.png).")
    ] = "demo.png",
) -> None:
    """Train on four local nodes and lose two of them on the way.

    The cluster is its own: it is named anew each time, and nothing is left of it, however the demo ends.
    """
    many = parse_flag("--steps", steps, whole_number(1000)) or 1000
    path = _checked_picture(picture)
    _require("torch", "sklearn", "matplotlib")
    began = time.monotonic()
    local = LocalProvider("local", Dialog())
    name = f"demo-{secrets.token_hex(4)}"
    left: list[str] = []
    with as_interrupts():
        try:
            cluster = local.up(UpRequest(name=name, nodes_min=2, nodes_max=4))
            show = DemoRuns(cluster, StepGates(state_dir() / "local" / name / "holds"), began)
            show.tell("four nodes are up, each a process with its own address on this machine")
            calm = show.train_undisturbed(many)
            rough = show.train_while_nodes_go(many)
            show.print_timeline(rough)
            problems = [*_problems(calm, rough), *_draw(path, calm, rough)]
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second one would leave half of it
                signal.signal(number, signal.SIG_IGN)
            left = _take_down(local, name)
    show.tell("down: " + ("all processes have ended" if not left else f"still there: {', '.join(left)}"))
    problems += left
    result = (
        f"accuracy={rough.accuracy:.4f} undisturbed={calm.accuracy:.4f}"
        f" steps_redone_notice={rough.notice.redone} steps_redone_kill={rough.kill.redone}"
        f" resume_s_notice={rough.notice.resume_s:.2f} resume_s_kill={rough.kill.resume_s:.2f}"
    )
    if problems:
        out(f"demo: failed {result}")
        raise GpuctlError("the demo failed: " + "; ".join(problems), "please report this")
    out(f"demo: ok {result}")


def _take_down(local: LocalProvider, name: str) -> list[str]:
    """Names what is left. Its bucket goes too: nobody else has written to it."""
    made = clusters.get(name)
    if made is None:
        return []
    left = local.down(made)
    if not left:
        shutil.rmtree(state_dir() / "buckets" / name, ignore_errors=True)
        shutil.rmtree(state_dir() / "local" / name, ignore_errors=True)
    return left


def _checked_picture(text: str) -> Path:
    """Check the path of the picture before the demo and not after it. Raises ``BadInput``."""
    path = Path(text)
    if path.suffix not in _PICTURES:
        raise BadInput(f"--picture {text} is not a picture format", f"end its name in one of: {', '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise BadInput(f"--picture {text}: folder {path.parent} does not exist", "create it first, or choose another")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"--picture {text} cannot be written", "choose another file")
    return path


def _problems(calm: DemoRun, rough: DemoRun) -> list[str]:
    """A line for each thing that did not go as promised."""
    found = []
    if abs(calm.accuracy - rough.accuracy) > _ACCURACY_TOLERANCE:
        found.append(f"accuracy {rough.accuracy:.4f} is not that of the undisturbed run, {calm.accuracy:.4f}")
    if rough.notice.redone != 0:
        found.append(f"{rough.notice.redone} steps were redone after the notice")
    if not 0 <= rough.kill.redone <= INTERVAL:
        found.append(f"{rough.kill.redone} steps were redone after the kill: more than one interval of {INTERVAL}")
    if len(calm.lived) != 1:
        found.append(f"the undisturbed run took {len(calm.lived)} rounds")
    return found


def _draw(path: Path, calm: DemoRun, rough: DemoRun) -> list[str]:
    """Write the picture; returns a line if that failed."""
    from gpuctl.cli.commands.other.demo_plot import draw  # matplotlib takes a second to import

    try:
        draw(path, calm.points, rough.points, rough.lived, "Handwritten digits on four nodes, two of them lost")
    except OSError as error:
        return [f"the picture could not be written: {error}"]
    say(f"picture: {path}")
    return []


def _require(*modules: str) -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise BadInput(f"the demo needs {', '.join(missing)}", pip_install("demo"))
