"""What is not said again stays as it was: all flags of ``up`` on all providers. The flags are taken from the program:
a new one without an entry here fails.
"""

from __future__ import annotations

import inspect
import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuctl.cli.commands.machines.up import verb
from gpuctl.cli.main import run
from gpuctl.cli.session.rental_plan import backend_of, last_of, standing
from gpuctl.cli.session.renting import TermFlags
from gpuctl.cli.settings.resolve import load
from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster
from tests.e2e.machine import Cluster

_HOW = {"provider", "wait", "yes", "force", "dry_run", "verify", "skip_check", "output", "cluster"}
"""Parameters of ``up`` that say how to go about it, or which cluster is meant."""


def _on_all(*words: str) -> dict[str, list[str]]:
    return {cloud: list(words) for cloud in CLOUDS}


_OF_CLOUDS: dict[str, dict[str, list[str]]] = {
    "nodes": _on_all("--nodes", "2:3"),
    "slots": _on_all("--slots", "2"),
    "bucket": {
        "aws": ["--bucket", "s3://team/runs"],
        "gcp": ["--bucket", "gs://team/runs"],
        "azure": ["--bucket", "az://box/runs?account_name=team"],
    },
    "backend": _on_all("--backend", "s3://states"),
    "machine_type": {
        "aws": ["--type", "g5.2xlarge"],
        "gcp": ["--type", "g2-standard-8"],
        "azure": ["--type", "Standard_NC40ads_H100_v5"],
    },
    "gpu": {"aws": ["--gpu", "A100"], "gcp": ["--gpu", "H100"], "azure": ["--gpu", "H100"]},
    "gpus": {"aws": ["--gpus", "4"], "gcp": ["--gpus", "4"], "azure": ["--gpus", "8"]},
    "region": {
        "aws": ["--region", "us-west-2", "--type", "g5.xlarge"],
        "gcp": ["--region", "europe-west4", "--type", "g2-standard-8"],
        "azure": ["--region", "westus2", "--type", "Standard_NC24ads_A100_v4"],
    },
    "zone": {"aws": ["--zone", "us-east-1c"], "gcp": ["--zone", "us-central1-b"], "azure": ["--zone", "2"]},
    "spot": _on_all("--on-demand"),
    "ssh_from": _on_all("--ssh-from", "203.0.113.7"),
    "ssh_key": _on_all("--ssh-key", "KEY"),
    "image": {
        "aws": ["--image", "ami-0123456789abcdef0"],
        "gcp": ["--image", "projects/p/global/images/i"],
        "azure": ["--image", "microsoft-dsvm:ubuntu-hpc:2404:1.0"],
    },
    "placement": _on_all("--no-placement"),
    "idle_minutes": _on_all("--idle-minutes", "60"),
    "hold_ill_minutes": _on_all("--hold-ill", "1h"),
    "stall_minutes": _on_all("--stall-minutes", "60"),
}
"""By parameter of ``up``, and cloud: a value that is not the default."""
_OF_SSH_ALONE = {"hosts"}
_TERMS = {"slots", "idle_minutes", "stall_minutes", "hold_ill_minutes"}
_KIND_OF_KEY = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
"""What a public key begins with, before its 32 bytes."""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".ssh").mkdir()
    for name, number in (("id_ed25519", 1), ("other", 2)):
        words = b64encode(_KIND_OF_KEY + bytes([number] * 32)).decode()
        (tmp_path / ".ssh" / f"{name}.pub").write_text(f"ssh-ed25519 {words} me@here\n")


def test_every_flag_of_up_has_an_entry() -> None:
    assert set(inspect.signature(verb).parameters) - _HOW == set(_OF_CLOUDS) | _OF_SSH_ALONE


def planned(capsys: pytest.CaptureFixture[str], cloud: str, *flags: str) -> dict[str, Any]:
    """What ``up`` would ask a cloud for, but for what the nodes are told: that has secrets of this run in it."""
    code = run(["up", "--provider", cloud, "--dry-run", "-o", "json", *flags])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    request: dict[str, Any] = json.loads(shown.out)["request"]
    return {name: value for name, value in request.items() if name not in ("user_data", "id")}


@pytest.mark.slow
@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("name", sorted(set(_OF_CLOUDS) - _TERMS - {"backend"}))
def test_what_is_asked_of_a_cloud_stays(
    cloud: CloudName, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(tmp_path / ".ssh" / "other.pub") if one == "KEY" else one for one in _OF_CLOUDS[name][cloud]]
    usual, first = planned(capsys, cloud), planned(capsys, cloud, *flags)
    assert first != usual
    request = msgspec.convert(first, StackRequest)
    last_request.remember(LastRequest(request=request, terms=NodeOptions(zones=request.zones)))
    clusters.remember(KnownCluster(name="default", provider=cloud, bucket=request.bucket_url()))
    assert planned(capsys, cloud) == first


@pytest.mark.slow
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_zone_that_was_tried_and_not_asked_for_does_not_stay(
    cloud: CloudName, capsys: pytest.CaptureFixture[str]
) -> None:
    """``any`` gives up one that was asked for, and so does another region."""
    assert "zones" not in planned(capsys, cloud)
    there = planned(capsys, cloud, *_OF_CLOUDS["zone"][cloud])
    tried = msgspec.convert(there, StackRequest)
    last_request.remember(LastRequest(request=tried, terms=NodeOptions()))
    assert "zones" not in planned(capsys, cloud)
    last_request.remember(LastRequest(request=tried, terms=NodeOptions(zones=tried.zones)))
    assert planned(capsys, cloud)["zones"] == there["zones"]
    assert "zones" not in planned(capsys, cloud, "--zone", "any")
    assert "zones" not in planned(capsys, cloud, *_OF_CLOUDS["region"][cloud])


@pytest.mark.parametrize("name", sorted(_TERMS))
def test_what_nodes_are_told_stays(name: str) -> None:
    given = TermFlags(idle_minutes="60", stall_minutes="70", hold_ill_minutes="1h").of_nodes(2)
    last = LastRequest(request=_request(), terms=given)
    assert getattr(TermFlags().of_nodes(None, last), name) == getattr(given, name) != getattr(NodeOptions(), name)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_where_pulumis_state_is_stays(cloud: CloudName) -> None:
    request = msgspec.structs.replace(_request(), provider=cloud)
    last_request.remember(LastRequest(request=request, terms=NodeOptions(), backend="s3://states"))
    settings = standing(load({"provider": cloud}))
    assert backend_of(settings, last_of(settings)) == "s3://states"


def _request() -> StackRequest:
    return StackRequest(
        cluster="default", provider="aws", type="g5.xlarge", nodes_min=1, nodes_max=1, region="us-east-1"
    )


# -- local -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "state", tmp_path / "work")
    try:
        yield made
    finally:
        made.end()


def test_a_local_cluster_stays_what_it_is(cluster: Cluster, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/own"
    cluster.run("up", "--nodes", "1:2", "--bucket", url, "--slots", "1", "--stall-minutes", "60")
    bucket, noted = open_bucket(url), clusters.get("default")
    spec = decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)
    assert (spec.nodes_min, spec.nodes_max, spec.slots, spec.stall_minutes) == (1, 2, 1, 60)
    assert noted and noted.id == spec.id and len(spec.id) == 10 and "@" in spec.owner
    done = cluster.run("up")
    assert "0 nodes started, 2 already running" in done.stderr
    assert "1 to 2 nodes (local)" in done.stdout and url in done.stdout
    assert decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER) == spec
    assert clusters.get("default") == noted
    for words in (["--bucket", f"{url}2"], ["--slots", "2"], ["--stall-minutes", "30"]):
        refused = cluster.run("up", *words, code=2).stderr
        assert refused.count("\n") == 1 and "run `gpuctl down` first" in refused
    assert clusters.get("default") == noted

    stranger = Cluster(tmp_path / "stranger", tmp_path / "elsewhere")
    for words in ([], ["--cluster", "other"]):
        refused = stranger.run("up", "--bucket", url, *words, code=2).stderr
        assert f"error: {url} holds cluster 'default' of {spec.owner}, since " in refused
        assert f", 2 nodes live; to join it: gpuctl attach {url}" in refused
    assert decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER) == spec
    cluster.run("down", "-y")
    assert bucket.get(layout.CLUSTER) is None
