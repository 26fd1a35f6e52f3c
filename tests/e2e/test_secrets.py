"""What a job is told in confidence, and who else on this machine may read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cluster import layout
from tests.e2e.machine import Cluster

TOKEN = "hf_precious"


@pytest.mark.slow
def test_a_token_that_a_job_is_given_is_for_this_user_alone(cluster: Cluster) -> None:
    cluster.up("1")
    cluster.write("nothing.py", "pass")
    cluster.run("train", "-d", "--env", f"HF_TOKEN={TOKEN}", "nothing.py")
    spec = cluster.state / "buckets" / cluster.name / layout.job_spec(cluster.newest_job() or "")
    assert TOKEN in spec.read_text()
    holding = [path for path in cluster.state.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert spec in holding
    assert [path for path in holding if _others_may_read(path, cluster.state)] == []
    assert cluster.state.stat().st_mode & 0o077 == 0
    assert (cluster.state / "buckets" / cluster.name).stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_bucket_elsewhere_is_private_if_it_is_new(cluster: Cluster, tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    old.chmod(0o750)
    for folder, mode in ((new, 0o700), (old, 0o750)):
        cluster.run("up", "--nodes", "1", "--bucket", folder.as_uri())
        assert (folder / layout.CLUSTER).is_file()
        assert folder.stat().st_mode & 0o777 == mode
        cluster.run("down", "--yes")


def _others_may_read(path: Path, state: Path) -> bool:
    """Even if the state directory itself were open."""
    ways = [folder for folder in path.parents if state in folder.parents]
    return all(folder.stat().st_mode & 0o011 for folder in ways) and path.stat().st_mode & 0o044 != 0
