"""What a repeated ``up`` says that it changes."""

from __future__ import annotations

from msgspec.structs import replace

from gpuctl.cli.session.renting import changes_since
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
