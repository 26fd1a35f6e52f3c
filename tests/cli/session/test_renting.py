"""What ``up`` says before it rents: what it changes, and what a cloud would refuse."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from gpuctl.cli.session import renting
from gpuctl.cli.session.renting import TermFlags, changes_since, duration, refuse_failed_checks
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.answers import PreflightCheck
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from tests.fakes.requests import asked

REQUEST = asked("aws", cluster="big")


def test_what_was_begun_and_not_ended_is_no_cluster_in_which_nothing_changes() -> None:
    last = LastRequest(request=REQUEST, terms=NodeOptions())
    assert changes_since(None, REQUEST, NodeOptions()) is None
    assert changes_since(last, REQUEST, NodeOptions()) == []
    more = replace(REQUEST, nodes_max=8)
    assert changes_since(replace(last, is_done=False), more, NodeOptions()) == [
        "goes on with what an earlier `gpuctl up --cluster big` began",
        "nodes: 2:4 -> 2:8",
    ]


@pytest.mark.parametrize(
    ("text", "minutes"), [("1h", 60.0), ("1.5h", 90.0), ("30m", 30.0), ("0", 0.0), ("0m", 0.0), (" 2h ", 120.0)]
)
def test_a_time_is_given_in_hours_or_minutes(text: str, minutes: float) -> None:
    assert duration(text) == minutes


@pytest.mark.parametrize("text", ["", "1", "-1h", "1 h", "1d", "an hour", "1h30m", "nan"])
def test_what_is_no_time_is_refused_with_one_that_is(text: str) -> None:
    flags = TermFlags(hold_ill_minutes=text)
    with pytest.raises(BadInput, match=r"^--hold-ill .* is not a time") as refused:
        flags.of_nodes(None)
    assert "30m or 1h" in str(refused.value)


def test_how_long_a_machine_that_is_ill_is_held_is_told_when_it_changes() -> None:
    last = LastRequest(request=REQUEST, terms=NodeOptions())
    assert changes_since(last, REQUEST, NodeOptions(hold_ill_minutes=60)) == ["hold ill: 0 minutes -> 60 minutes"]


class Refusing:
    """A cloud that says no twice."""

    def checks(self, *_: object) -> list[PreflightCheck]:
        failed = [PreflightCheck.fail(name, "none") for name in ("permissions", "quota")]
        return [PreflightCheck.ok("region", "here"), *failed]


@pytest.mark.parametrize(
    ("skipped", "said", "left"),
    [
        ("", "error: permissions: none\nerror: quota: none\n", "permissions,quota"),
        ("permissions", "warning: permissions: none\nerror: quota: none\n", "quota"),
        ("quota, permissions", "warning: permissions: none\nwarning: quota: none\n", ""),
    ],
)
def test_a_check_that_fails_ends_up_unless_it_is_skipped(
    skipped: str, said: str, left: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(renting, "cloud", lambda _: Refusing())
    if left:
        with pytest.raises(BadInput, match=rf"aws would refuse these machines; .* --skip-check {left} goes on"):
            refuse_failed_checks(REQUEST, skipped)
    else:
        refuse_failed_checks(REQUEST, skipped)
    assert capsys.readouterr().err == said


def test_a_check_that_there_is_not_cannot_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renting, "cloud", lambda _: Refusing())
    said = "--skip-check rights: there is no such check; there are: region, permissions, quota"
    with pytest.raises(BadInput, match=re.escape(said)):
        refuse_failed_checks(REQUEST, "rights")
