"""One warm interpreter for each environment, as long as a job needs it."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.bootstrap.environments.disk import NodeEnvironment
from gpuctl.bootstrap.environments.install import build
from gpuctl.bootstrap.environments.install.uv import Uv
from gpuctl.bootstrap.jobs.interpreters import OWN, Interpreters
from gpuctl.bootstrap.launch.interpreter import Interpreter
from gpuctl.cluster.records.environments import Environment, PackedFiles
from tests.bootstrap.launch.test_interpreter import Bench
from tests.waiting import until

SCRIPT = """
import importlib.metadata, multiprocessing, os, subprocess, sys
import einops, torch

def child(pipe):
    import einops
    pipe.send(einops.__version__)

if __name__ == "__main__":
    print(sys.prefix == os.environ["VIRTUAL_ENV"], einops.__version__, importlib.metadata.version("einops"))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    print(ours.recv())
    said = {"capture_output": True, "text": True}
    print(subprocess.run([sys.executable, "-c", "import einops; print(einops.__version__)"], **said).stdout)
    print(subprocess.run(["python", "-c", "import sys; print(sys.prefix)"], **said).stdout)
"""


@pytest.fixture
def environment(tmp_path: Path) -> NodeEnvironment:
    """One with a package, in place of uv's work."""
    folder = tmp_path / "environment"
    build.make_empty(folder, Uv({"PATH": os.environ["PATH"]}, tmp_path / "cache"), what="x")
    site = build.site_packages(folder)
    (site / "einops.py").write_text('__version__ = "99.0"\n')
    (site / "einops-99.0.dist-info").mkdir()
    (site / "einops-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: einops\nVersion: 99.0\n")
    pack = PackedFiles(sha256="", bytes=0)
    return NodeEnvironment(folder, Environment(digest="e", file="f", packages={}, bytes=1, files=1, pack=pack))


@pytest.fixture
def interpreters(tmp_path: Path) -> Iterator[Interpreters]:
    found = Interpreters(dict(os.environ), tmp_path, lambda: None)
    yield found
    found.stop()


def test_workers_in_an_environment_see_its_packages_in_every_way(
    tmp_path: Path, environment: NodeEnvironment, interpreters: Interpreters
) -> None:
    bench = Bench.__new__(Bench)
    bench.__dict__.update(folder=tmp_path, exits=queue.Queue(), interpreter=interpreters.of(environment))
    found = environment.variables({"PATH": os.environ["PATH"]})
    bench.launch(SCRIPT, PATH=found["PATH"], VIRTUAL_ENV=found["VIRTUAL_ENV"])
    assert bench.ended().failures == ()
    lines = bench.printed().split("\n")
    assert lines[0] == "True 99.0 99.0", bench.printed()
    assert [line for line in lines[1:] if line] == ["99.0", "99.0", str(environment.folder)]


def test_those_that_no_job_needs_end(environment: NodeEnvironment, interpreters: Interpreters) -> None:
    own, other = interpreters.of(None), interpreters.of(environment)
    assert interpreters.of(None) is own and interpreters.of(environment) is other is not own
    interpreters.keep(None)
    assert not _has_ended(own) and not _has_ended(other), "nobody knows what comes next"
    interpreters.keep({"e"})
    assert _has_ended(own) and not _has_ended(other)
    assert interpreters.of(None) is not own
    interpreters.keep({OWN})
    assert _has_ended(other)


def test_they_are_ready_when_all_are(environment: NodeEnvironment, interpreters: Interpreters) -> None:
    assert not interpreters.is_ready
    interpreters.of(environment)
    assert not interpreters.is_ready and interpreters.warm() == []
    until(lambda: interpreters.is_ready, "the interpreter is warm")
    assert interpreters.warm() == ["e"]


def test_one_whose_workers_are_about_to_be_launched_stays(
    environment: NodeEnvironment, interpreters: Interpreters
) -> None:
    taken = interpreters.take(environment)
    interpreters.keep({OWN})
    assert not _has_ended(taken) and interpreters.take(environment) is taken


def test_one_that_runs_workers_stays(
    environment: NodeEnvironment, interpreters: Interpreters, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = interpreters.of(environment)
    monkeypatch.setattr(Interpreter, "is_idle", property(lambda self: self is not busy))
    interpreters.keep({OWN})
    assert not _has_ended(busy)


def _has_ended(one: Interpreter) -> bool:
    return one._process.poll() is not None
