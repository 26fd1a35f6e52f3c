"""Two clusters in every combination of user, laptop, name, bucket and prefix: nothing changes what is not one's own.

``test_not_ours`` and its like have a few of these on each cloud, through the command line.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cli.commands.machines.kept_checkpoints import delete_checkpoints_of
from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.providers.interface import Dialog, UpRequest, provider
from gpuctl.stacks.providers.ownership import bucket_of, forget_nodes, settle
from gpuctl.stacks.state import clusters

_PLACES = {"same": "team/x", "beside": "team/y", "above": "team", "below": "team/x/nodes", "another bucket": "own/x"}
"""Of the second cluster, by how it is to the first's, ``team/x``."""
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Person:
    """A user on a laptop, whose state folder is theirs alone."""

    user: str
    laptop: str
    folder: Path
    patch: pytest.MonkeyPatch

    def up(self, name: str, url: str) -> Bucket:
        """As ``up`` does before it starts nodes; one tells of itself, and a job has a checkpoint."""
        self._sit_down()
        request = UpRequest(name=name, bucket=url)
        bucket = open_bucket(bucket_of(request))
        settle(bucket, request, ClusterSpec(name=name, provider="local", nodes_min=1, nodes_max=1), lambda _: None)
        node = f"{name}-of-{self.user}-at-{self.laptop}"
        bucket.put(
            layout.node(node), encode(NodeRecord(node=node, incarnation="i", beat=1, address="127.0.0.1", port=1))
        )
        bucket.put(f"{layout.checkpoints(node)}/10/weights", node.encode())
        return bucket

    def down(self, name: str, bucket: Bucket, *, delete_checkpoints: bool = False) -> None:
        self._sit_down()
        there = clusters.find(name)
        forget_nodes(bucket, of=there.id)
        clusters.forget(name)
        if delete_checkpoints:
            delete_checkpoints_of(provider("local", Dialog()), there, bucket, is_own=False)

    def _sit_down(self) -> None:
        self.patch.setenv("LOGNAME", self.user)
        self.patch.setattr(platform, "node", lambda: self.laptop)
        self.patch.setenv("GPUCTL_STATE_DIR", str(self.folder / f"{self.user}@{self.laptop}"))


def objects(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("state", ["live", "idle", "down"])
@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize(
    ("user", "laptop", "name"), list(itertools.product(["kim", "jo"], ["lab", "home"], ["a", "b"]))
)
def test_a_second_cluster_changes_nothing_of_the_first(
    user: str, laptop: str, name: str, place: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kim = Person("kim", "lab", tmp_path / "state", monkeypatch)
    bucket = kim.up("a", (tmp_path / _PLACES["same"]).as_uri())
    if state == "down":
        kim.down("a", bucket)
    elif state == "idle":
        _make_old(tmp_path / _PLACES["same"], bucket)
    before = objects(tmp_path / _PLACES["same"])

    second = Person(user, laptop, tmp_path / "state", monkeypatch)
    is_same = (user, laptop) == ("kim", "lab")
    is_up_here = is_same and name == "a" and state != "down"
    may_go_on = place == "same" and (is_up_here or (is_same and state == "down"))
    is_refused = is_up_here and place != "same"  # it has its bucket already
    if place in ("same", "above", "below"):
        is_refused |= not may_go_on and not (is_same and state == "down")
    try:
        its = second.up(name, (tmp_path / _PLACES[place]).as_uri())
    except GpuctlError:
        assert is_refused
    else:
        assert not is_refused
        try:
            second.down(name, its, delete_checkpoints=True)
        except GpuctlError as error:
            assert place == "above" and "also holds x" in error.message
    after = objects(tmp_path / _PLACES["same"])
    if may_go_on:
        assert not after, "it is one's own, and nothing else is there"
    else:
        assert {key: after.get(key) for key in before} == before


def _make_old(folder: Path, bucket: Bucket) -> None:
    """As if its machines had been away for an hour."""
    at = time.time() - _HOUR_S
    for path in folder.rglob("*.json"):
        os.utime(path, (at, at))
    record = clusters.find("a")
    spec = ClusterSpec(name="a", provider="local", nodes_min=1, nodes_max=1, id=record.id, owner="kim@lab")
    bucket.put(layout.CLUSTER, encode(replace(spec, created_at=at)))
