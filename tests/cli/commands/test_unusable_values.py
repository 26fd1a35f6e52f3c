"""A value that is empty or not UTF-8 is refused by every verb, before it does anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpuctl.cli.main import run
from gpuctl.cli.verbs import VERBS, load
from gpuctl.cluster import layout
from gpuctl.cluster.jobs import queue
from tests.fakes.written_cluster import WrittenCluster

NOT_UTF8 = os.fsdecode(b"\xff")


class Place(NamedTuple):
    """Where a verb takes text."""

    verb: str
    name: str
    """As messages call it."""
    before: tuple[str, ...]
    """The words before the value."""
    after: tuple[str, ...] = ()


def _places() -> Iterator[Place]:
    for name in VERBS:
        command = load(name)
        below = getattr(command, "commands", None)
        for path, one in {f"{name} {sub}": one for sub, one in below.items()}.items() if below else [(name, command)]:
            needed = [param for param in one.params if param.param_type_name == "argument" and param.required]
            for param in one.params:
                if getattr(param, "is_flag", False):
                    continue
                if param.param_type_name == "option":
                    flag = next(opt for opt in param.opts if opt.startswith("--"))
                    yield Place(path, flag, (*("x" for _ in needed), flag))
                elif param.metavar != "ARGS":
                    yield Place(path, _word(param), *_around(param, needed))


def _word(param: Any) -> str:
    return str(param.metavar.strip("[]."))


def _around(param: Any, needed: list[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    at = needed.index(param) if param in needed else len(needed)
    return ("x",) * at, ("x",) * (len(needed) - at - 1)


PLACES = list(_places())


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.verb} {place.name}")
@pytest.mark.parametrize("value", ["", NOT_UTF8], ids=["empty", "not UTF-8"])
def test_it_is_refused_in_one_line(
    place: Place, value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = run([*place.verb.split(), *place.before, value, *place.after])
    said = capsys.readouterr()
    what = "is empty; give a value" if not value else "\\xff is not UTF-8; "
    assert (code, said.out) == (2, "")
    assert said.err.startswith(f"error: {place.name} {what}")
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "state").exists()


def test_the_table_has_every_verb_that_takes_a_job() -> None:
    taking = {place.verb for place in PLACES if place.name in ("JOB", "--job")}
    assert taking == {
        "logs",
        "cancel",
        "ckpt ls",
        "ckpt pull",
        "ckpt rm",
        "ckpt verify",
        "ckpt gc",
        "forward",
        "shell",
        "jupyter",
        "code",
    }


def test_an_empty_job_ends_and_deletes_nothing(written: WrittenCluster) -> None:
    job = written.submit().job
    written.checkpoint(job, 5, {"weight": b"x"})
    before = {entry.key for entry in written.store.list("")}
    assert "JOB is empty" in written.run("cancel", "", code=2).stderr
    assert "--job is empty" in written.run("ckpt", "rm", "all", "-y", "-j", "", code=2).stderr
    assert {entry.key for entry in written.store.list("")} == before
    assert written.store.get(layout.cancel(job)) is None


def test_a_scripts_own_arguments_may_be_empty(written: WrittenCluster) -> None:
    (written.work / "train.py").write_text("print('hello')\n")
    written.run("train", "-d", "train.py", "--", "", "x")
    assert queue.find(written.store, None).args == ("", "x")


@pytest.mark.parametrize(
    "words", [["script-\xff.py"], ["train.py", "--", NOT_UTF8], ["train.py", "-e", f"A={NOT_UTF8}"]]
)
def test_nothing_is_sent_for_a_job_that_cannot_be_written_down(written: WrittenCluster, words: list[str]) -> None:
    words = [word.replace("\xff", NOT_UTF8) for word in words]
    (written.work / "train.py").write_text("print('hello')\n")
    said = written.run("train", *words, code=2).stderr
    assert "is not UTF-8" in said and len(said.splitlines()) == 1
    assert written.store.list("code") == [] and written.store.list("jobs") == []


@pytest.mark.parametrize("variable", ["GPUCTL_ENV", "GPUCTL_CLUSTER", "GPUCTL_BUCKET"])
def test_neither_may_a_variable_be_unreadable(written: WrittenCluster, variable: str) -> None:
    written.env[variable] = f"A={NOT_UTF8}"
    said = written.run("status", code=2).stderr
    assert said.startswith(f"error: {variable} ") and "is not UTF-8" in said
