"""What the command line answers: a table of inputs, good and bad, with their exit codes and a part of the answer.

The table is ``answers.tsv``: command, exit code, a part of the answer, and where the text or the feature is still to
come what that is. A command may begin with ``env NAME=VALUE``, or with ``cd gone;``: in a folder that was deleted.
"""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

from gpuctl.cli.main import run
from gpuctl.cluster.records.rounds import JobOutcome
from tests.fakes.written_cluster import WrittenCluster

TABLE = Path(__file__).with_name("answers.tsv")


class Answer(NamedTuple):
    command: str
    code: int
    part: str
    to_come: str


def _table() -> list[Answer]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Answer(command, int(code), part, to_come) for command, code, part, to_come in rows]


@pytest.fixture
def here(written: WrittenCluster, monkeypatch: pytest.MonkeyPatch) -> WrittenCluster:
    """A user's folder, and a local cluster with a job that has ended."""
    written.lead("node-0", view={"node-0": "live", "node-1": "live"})
    written.beat("node-1")
    job = written.submit().job
    written.round(job, 1, ("node-0", "node-1"))
    written.log(job, 1, "node-0", "hello")
    written.checkpoint(job, 5, {"w": b"1234"})
    written.end(job, 1, JobOutcome(result="succeeded", exit_code=0))
    (written.work / "ok.py").write_text("print('ok')\n")
    (written.work / "broken.py").write_text("def oops(:\n")
    (written.work.parent / "outside.py").write_text("")
    (written.work / "pkg").mkdir()
    for name in [name for name in os.environ if name.startswith(("GPUCTL_", "AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(written.home / "state"))
    monkeypatch.setenv("HOME", str(written.home))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: PTH123, SIM115 - as long as the test
    monkeypatch.chdir(written.work)
    return written


@pytest.mark.parametrize("answer", _table(), ids=lambda answer: answer.command)
def test_the_answer_is_the_one_in_the_table(
    answer: Answer, here: WrittenCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _, command = answer.command.rpartition("; ")
    words = shlex.split(command.replace("{here}", str(here.home)))
    while words[0] != "gpuctl":
        name, is_set, value = words.pop(0).partition("=")
        if is_set:
            monkeypatch.setenv(name, value)
    if where:
        gone = here.home / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        shutil.rmtree(gone)
    try:
        code = run(words[1:])
    except BaseException:  # noqa: BLE001 - whatever it is, the command would end with it
        pytest.fail(f"{answer.command}\n{traceback.format_exc()}")
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert (code, answer.part in said.out + said.err) == (answer.code, True), said.out + said.err
    if code == 2:
        assert [line[:6] for line in said.err.splitlines()] == ["error:"], said.err
