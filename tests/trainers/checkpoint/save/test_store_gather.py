"""How the ranks of a save come together once their scripts have ended, and what they leave in the job's store."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.trainers.checkpoint.save.uploader import AFTER_END_S
from tests.trainers.rank_scripts import gathering
from tests.trainers.ranks import Ranks, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("later_s", "comes", "told"),
    [(AFTER_END_S + 60, True, "2 reports"), (10 * AFTER_END_S, False, "the other ranks have not finished")],
)
def test_a_rank_whose_script_has_ended_outlasts_another_ones_outage_and_no_more(
    tmp_path: Path, later_s: float, comes: bool, told: str
) -> None:
    with Ranks(2, gathering.meet_after_the_end, str(tmp_path), later_s, comes) as ranks:
        assert [end.code for end in ranks.wait()] == [0, 0]
    assert (tmp_path / "told").read_text().startswith(told)


def test_saves_leave_no_more_in_the_jobs_store_than_the_last_of_them_needs() -> None:
    few, many = run(2, gathering.exchange, 2)[0], run(2, gathering.exchange, 12)[0]
    assert few == many
