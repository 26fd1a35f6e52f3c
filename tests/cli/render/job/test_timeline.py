"""What a job lived through, from its records."""

from __future__ import annotations

import doctest

from gpuctl.cli.commands.other import demo_plot
from gpuctl.cli.render.job.timeline import Point, kept, redone, round_spans
from gpuctl.cluster.records.rounds import Member, NodeExit, Round


def _round(number: int, phase: str, nodes: int, reason: str = "") -> Round:
    members = tuple(Member(node=f"n{i}", incarnation="a", address="", nproc=1) for i in range(nodes))
    return Round(job="j", number=number, phase=phase, epoch=1, members=members, reason=reason)  # type: ignore[arg-type]


def _points(number: int, *steps: int) -> list[Point]:
    return [Point(number, step, at=float(step), loss=1.0 / step) for step in steps]


def _exit(number: int, last_step: int) -> NodeExit:
    return NodeExit(job="j", round=number, node="n0", incarnation="a", status="stopped", last_step=last_step)


def test_a_round_reaches_from_its_first_step_to_the_last_that_any_node_finished() -> None:
    history = [_round(1, "run", 3, "job starts"), _round(1, "drain", 3, "n2 given notice"), _round(2, "run", 2, "n2")]
    lived = round_spans(history, [_exit(1, 13)], [*_points(1, 1, 5, 10), *_points(2, 14, 20)])
    assert [(s.number, s.nodes, s.first.step, s.last_step, s.reason) for s in lived] == [
        (1, 3, 1, 13, "job starts"),
        (2, 2, 14, 20, "n2"),
    ]
    assert redone(*lived) == 0


def test_steps_made_twice_are_counted_and_the_later_ones_kept() -> None:
    points = [*_points(1, 8, 9, 10), Point(2, 9, 50.0, 0.5), Point(2, 10, 51.0, 0.4)]
    lived = round_spans([_round(1, "run", 2), _round(2, "run", 2)], [], points)
    assert redone(*lived) == 2
    assert [(p.step, p.round) for p in kept(points)] == [(8, 1), (9, 2), (10, 2)]


def test_a_round_is_as_fast_as_from_its_first_record_to_its_last_with_or_without_a_loss() -> None:
    points = [Point(1, 10, 100.0, None), Point(1, 30, 104.0, None), Point(2, 31, 110.0, 0.5)]
    lived = round_spans([_round(1, "run", 2), _round(2, "run", 2)], [_exit(1, 33)], points)
    assert [(s.last_step, s.steps_per_s) for s in lived] == [(33, 5.0), (31, None)]


def test_a_round_without_a_step_is_left_out() -> None:
    history = [_round(1, "run", 2), _round(2, "wait", 0), _round(3, "run", 2)]
    assert [s.number for s in round_spans(history, [], [*_points(1, 1), *_points(3, 2)])] == [1, 3]


def test_a_label_of_the_picture_ends_before_the_next_line() -> None:
    assert doctest.testmod(demo_plot) == (0, 1)
