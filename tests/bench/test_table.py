"""The table of several runs of a bench."""

from __future__ import annotations

from tests.bench.table import compared, failed, joined, shown_runs


def test_a_bar_is_met_when_every_run_meets_it() -> None:
    runs = [
        [
            compared("one", [ours], [1.0], "s", 1.2),
            compared("two", [ours], [1.0], "s", 1.3),
            compared("all", [1], [2], "s"),
        ]
        for ours in (1.25, 1.0, 1.1)
    ]
    assert [(row.name, row.ratio, row.met) for row in joined(runs)] == [
        ("one", 1.1, False),
        ("two", 1.1, True),
        ("all", 0.5, None),
    ]
    assert shown_runs(runs).splitlines() == [
        "name  run 1  run 2  run 3  bar",
        "one   1.25   1      1.1    <= 1.2 x  MISSED",
        "two   1.25   1      1.1    <= 1.3 x  met",
        "all   0.5    0.5    0.5",
    ]


def test_a_run_that_failed_has_not_met_the_bar() -> None:
    whole = [compared("one / raw", [1.0], [1.0], "s", 1.2)]
    rows = joined([whole, [failed("one", "it broke")]])
    assert [(row.name, row.ours, row.met) for row in rows] == [
        ("one / raw", 1.0, False),
        ("one", "failed: it broke", False),
    ]
