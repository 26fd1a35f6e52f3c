"""How it looks."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import pytest

from gpuctl.cli.render import terminal
from tests.cli.commands.machines.test_status import running
from tests.fakes import person
from tests.fakes.written_cluster import WrittenCluster


def on_a_terminal(cluster: WrittenCluster, args: Sequence[str], columns: int, *, typed: str = "", **env: str) -> str:
    """What ``gpuctl args`` shows on a terminal so wide, with whatever is ``typed`` once it asks."""
    told = {**cluster.env, "NO_COLOR": "", "TERM": "xterm-256color", **env}
    return person.at_a_terminal(args, cluster.work, told, columns=columns, typed=typed)[1]


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_of_status_and_jobs_wraps(written: WrittenCluster, columns: int) -> None:
    running(written)
    written.submit("a_script_with_a_rather_long_name_for_a_job.py", ("--learning-rate", "0.1", "--epochs", "100" * 20))
    for verb in ("status", "jobs"):
        lines = person.plain(on_a_terminal(written, [verb], columns)).splitlines()
        assert max(len(line) for line in lines if not line.startswith("file:")) <= columns


def test_colours_are_for_terminals_that_want_them(written: WrittenCluster) -> None:
    running(written)
    assert "\033[32mlive\033[0m" in on_a_terminal(written, ["status"], 80)
    assert "\033" not in on_a_terminal(written, ["status"], 80, NO_COLOR="1")
    assert "\033" not in on_a_terminal(written, ["status"], 80, TERM="dumb")
    assert "\033" not in written.run("status").stdout


@pytest.mark.slow
def test_a_pull_shows_a_bar_on_a_terminal(written: WrittenCluster) -> None:
    job = written.submit().job
    written.checkpoint(job, 5, {"a.bin": b"x" * 1_000_000})
    shown = person.plain(on_a_terminal(written, ["ckpt", "pull", "5", "out"], 100))
    assert "step 5 of digits-1 ━━━━" in shown
    assert "1.0/1.0 MB" in shown


@pytest.mark.parametrize(("typed", "said"), [("y\n", "cluster default is down"), ("n\n", "error: nothing was changed")])
def test_down_asks_on_a_terminal_before_it_cancels_a_job(written: WrittenCluster, typed: str, said: str) -> None:
    written.submit()
    shown = person.plain(on_a_terminal(written, ["down"], 100, typed=typed))
    assert "digits-1 will be cancelled. Continue? [y/N]" in shown
    assert said in shown


def test_a_table_cuts_nothing_where_it_is_not_read_by_a_person() -> None:
    lines = terminal.table(("A", "B"), [("x" * 300, "1"), ("y", "20")], give=[0])
    assert lines[1] == "x" * 300 + "   1"
    assert lines[2] == "y".ljust(300) + "  20"


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(terminal).failed == 0
    assert doctest.testmod(terminal).attempted >= 3
