"""How often to save, from what saves cost and what was lost so far."""

from __future__ import annotations

import math

import pytest

from gpuctl import Checkpointer
from gpuctl.cluster.records.rounds import Round
from gpuctl.trainers.checkpoint.save.schedule import PRIOR_S, FailureHistory, SaveSchedule, plan


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_it_is_youngs_rule() -> None:
    losses = FailureHistory(running_s=3 * PRIOR_S, unannounced=1)
    found = plan(step_s=0.5, blocked_s=0.2, saving_s=3.0, losses=losses)
    assert found.steps == round(math.sqrt(2 * 0.2 * 2 * PRIOR_S) / 0.5)
    assert "1 without notice" in found.why
    assert f"sqrt(2 x 0.2 s x {2 * PRIOR_S:.0f} s)" in found.why


def test_no_save_is_due_before_the_one_before_it_can_be_committed() -> None:
    assert plan(step_s=1.0, blocked_s=0.001, saving_s=500.0, losses=FailureHistory()).steps == 500


@pytest.mark.parametrize(("saving_s", "counted"), [(20.0, 0), (60.0, 3)])
def test_a_loss_that_leaves_time_for_a_last_checkpoint_does_not_count(saving_s: float, counted: int) -> None:
    losses = FailureHistory(running_s=PRIOR_S, announced=3, lead_s=30.0)
    assert losses.between_s(saving_s) == 2 * PRIOR_S / (counted + 1)


def test_losses_are_read_from_the_rounds_of_a_job() -> None:
    rounds = [
        Round(job="a-1", number=1, phase="run", epoch=1, reason="job starts", at=100.0),
        Round(job="a-1", number=2, phase="wait", epoch=1, reason="node-1 lost, waiting for 1 more", at=200.0),
        Round(job="a-1", number=2, phase="run", epoch=1, reason="enough nodes again after: node-1 lost", at=230.0),
        Round(job="a-1", number=2, phase="drain", epoch=1, reason="node-2 given notice", drain_s=25.0, at=300.0),
        Round(job="a-1", number=3, phase="run", epoch=1, reason="node-2 given notice", at=310.0),
        Round(job="a-1", number=4, phase="run", epoch=1, reason="node-3 joined", at=320.0),
    ]
    assert FailureHistory.of(rounds, now=500.0) == FailureHistory(400.0, unannounced=1, announced=1, lead_s=25.0)
    longer = Round(job="a-1", number=4, phase="drain", epoch=1, reason="node-3 given notice", drain_s=90.0, at=400.0)
    assert FailureHistory.of([*rounds, longer], now=500.0) == FailureHistory(
        400.0, unannounced=1, announced=2, lead_s=25.0
    )
    assert FailureHistory.of([], now=500.0) == FailureHistory()


def test_every_so_many_steps() -> None:
    schedule = SaveSchedule(3)
    assert [step for step in range(1, 10) if schedule.is_due(step)] == [3, 6, 9]
    assert not any(SaveSchedule(None).is_due(step) for step in range(10))


@pytest.mark.parametrize(
    ("every", "began", "due"),
    [
        (300, 0, [500, 1000, 1500, 2000]),
        (700, 0, [1000, 1500]),
        (1000, 0, [1000, 2000]),
        (700, 1000, [1500, 2500, 3000]),
    ],
)
def test_a_save_that_was_due_in_between_is_due_at_the_next_chance(every: int, began: int, due: list[int]) -> None:
    schedule = SaveSchedule(every)
    schedule.begin(began)
    assert [step for step in range(began + 500, began + 2001, 500) if schedule.is_due(step)] == due


def test_the_interval_follows_what_was_measured() -> None:
    hands = Hands()
    interval = SaveSchedule("auto", lambda: FailureHistory(running_s=PRIOR_S, unannounced=7), hands)
    due = []
    for step in range(1, 1000):
        hands.s += 0.1
        if interval.is_due(step):
            due.append(step)
            interval.agreed(interval.propose(step))
            hands.s += 0.05
            interval.saved(step, 0.05)
            interval.committed(2.0)
    between = due[-1] - due[-2]
    assert between == pytest.approx(math.sqrt(2 * 0.05 * PRIOR_S / 4) / 0.1, rel=0.02)
    assert due[0] == 11
    assert interval.plan is not None
    assert interval.plan.steps == between


def test_a_checkpointer_says_which_interval_and_why(file_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = Checkpointer(file_url, every="auto", when_busy="wait")
    state = {"count": 1}
    for step in range(1, 40):
        checkpointer.step(step, state)
    checkpointer.wait()
    said = capsys.readouterr().err
    assert "gpuctl: a checkpoint every " in said
    assert "expected every 6 h (0 without notice in 0 h): sqrt(2 x " in said
