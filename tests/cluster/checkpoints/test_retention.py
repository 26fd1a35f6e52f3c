"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.checkpoints import CheckpointEntry


def entry(step: int, **metrics: float) -> CheckpointEntry:
    return CheckpointEntry(step=step, round=1, path=str(step), digest="", bytes=1, written=1, world=1, metrics=metrics)


def kept(retention: Retention, *entries: CheckpointEntry) -> list[int]:
    return [one.step for one in retention.kept(entries)]


HUNDREDS = [entry(step) for step in range(100, 3100, 100)]


def test_the_last_ones_stay() -> None:
    assert kept(Retention(last=2), *HUNDREDS) == [2900, 3000]
    assert kept(Retention(last=50), *HUNDREDS[:4]) == [100, 200, 300, 400]
    assert kept(Retention(last=None), *HUNDREDS) == [one.step for one in HUNDREDS]
    assert kept(Retention()) == []


def test_every_so_many_steps_one_stays_besides() -> None:
    assert kept(Retention(last=1, every=1000), *HUNDREDS) == [1000, 2000, 3000]
    assert kept(Retention(last=2, every=1000), *HUNDREDS[:15]) == [1000, 1400, 1500]


def test_where_a_notice_shifted_the_steps_the_next_one_stands_in() -> None:
    steps = [900, 977, 1037, 1137, 2004, 2104]
    assert kept(Retention(last=1, every=1000), *map(entry, steps)) == [1037, 2004, 2104]


@pytest.mark.parametrize(("way", "best"), [("min", 300), ("max", 100)])
def test_the_best_stays_and_of_equals_the_newest(way: str, best: int) -> None:
    entries = [entry(100, loss=3.0), entry(200, loss=1.0), entry(300, loss=1.0), entry(400), entry(500, loss=2.0)]
    retention = Retention(last=1, best="loss", best_is="max" if way == "max" else "min")
    assert kept(retention, *entries) == [best, 500]


def test_without_the_metric_none_is_the_best() -> None:
    assert kept(Retention(last=1, best="accuracy"), entry(1, loss=1.0), entry(2, loss=0.5)) == [2]


def test_a_rule_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="last=0 keeps no checkpoints; use 1 or more"):
        Retention(last=0)
    with pytest.raises(BadInput, match="every=-5 keeps no checkpoints"):
        Retention(every=-5)


steps = st.lists(st.integers(0, 400), max_size=30, unique=True).map(sorted)
rules = st.builds(
    Retention,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 100),
    best=st.sampled_from([None, "loss"]),
    best_is=st.sampled_from(["min", "max"]),
)


@pytest.mark.slow
@given(steps=steps, retention=rules, losses=st.data())
def test_one_after_the_other_leaves_the_same_as_all_at_once(
    steps: Sequence[int], retention: Retention, losses: st.DataObject
) -> None:
    """A job applies the rule with each commit, and ``gpuctl ckpt gc`` may do it long after."""
    values = losses.draw(st.lists(st.integers(0, 3), min_size=len(steps), max_size=len(steps)))
    entries = [entry(step, loss=value) for step, value in zip(steps, values, strict=True)]
    growing: tuple[CheckpointEntry, ...] = ()
    for one in entries:
        growing = retention.kept((*growing, one))
        assert growing[-1] == one, "the newest stays"
    assert growing == retention.kept(entries) == retention.kept(growing)
