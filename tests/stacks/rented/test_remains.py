"""What whoever runs ``up`` is told where it ends early."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.rented.remains import telling_what_is_there
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from tests.fakes.requests import asked
from tests.fakes.tagged import TaggedAccount

REQUEST = asked("aws", cluster="big")
MACHINE = Leftover(cluster="big", kind="instance", id="i-1", region=REQUEST.region, usd_per_hour=2.01)
COST = "remaining: 1 instance, $2.01/h"
REMOVES = f"{COST}; `gpuctl down --cluster big` removes it"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("error", "there", "line"),
    [
        (GpuctlError("boom"), (MACHINE,), f"boom; {REMOVES}"),
        (GpuctlError("boom"), (), "boom; nothing remains"),
        (GpuctlError("boom", "wait longer"), (MACHINE,), f"boom; wait longer ({REMOVES})"),
        (GpuctlError("boom", "wait longer"), (), "boom; wait longer (nothing remains)"),
        (
            GpuctlError("boom", "repeat it, or `gpuctl down --cluster big` to remove it"),
            (MACHINE,),
            f"boom; repeat it, or `gpuctl down --cluster big` to remove it ({COST})",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/state/x"),
            (MACHINE,),
            "cannot write /state/x: No space left on device; free some space; `gpuctl up --cluster big` continues,"
            f" `gpuctl down --cluster big` removes it ({COST})",
        ),
    ],
)
def test_a_failure_tells_what_is_there_and_how_to_end_what_costs_money(
    error: Exception, there: tuple[Leftover, ...], line: str
) -> None:
    with pytest.raises(GpuctlError) as raised, telling_what_is_there(TaggedAccount("aws", *there), REQUEST, print):
        raise error
    assert str(raised.value) == line


def test_what_is_where_the_last_up_was_is_told_too() -> None:
    last_request.remember(LastRequest(request=REQUEST, terms=NodeOptions()))
    elsewhere = replace(REQUEST, region="us-west-2")
    with (
        pytest.raises(GpuctlError, match="remaining: 1 instance"),
        telling_what_is_there(TaggedAccount("aws", MACHINE), elsewhere, print),
    ):
        raise GpuctlError("boom")


def test_ctrl_c_before_anything_is_noted_names_no_up_that_would_know_nothing() -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), telling_what_is_there(TaggedAccount("aws"), REQUEST, said.append):
        raise KeyboardInterrupt
    last_request.remember(LastRequest(request=REQUEST, terms=NodeOptions()))
    with pytest.raises(KeyboardInterrupt), telling_what_is_there(TaggedAccount("aws", MACHINE), REQUEST, said.append):
        raise KeyboardInterrupt
    assert said == [
        "interrupted: nothing remains; repeat the same command to go on",
        f"interrupted: {COST}; `gpuctl up --cluster big` continues, `gpuctl down --cluster big` removes it",
    ]
