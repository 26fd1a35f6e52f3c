"""``gpuctl env``: what it lists, and that nothing goes that a job runs in."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.environments import registry
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.environments import Environment, PackedFiles
from tests.fakes.written_cluster import WrittenCluster

ONE = Environment(
    digest="1" * 64,
    file="requirements.txt",
    packages={"einops": "0.8.2", "orjson": "3.13"},
    bytes=12_400_000,
    files=100,
    pack=PackedFiles(sha256="a" * 64, bytes=5),
    python="cpython-3.11",
    torch="2.13.0",
    built_at=1.0,
)


@pytest.fixture
def two(written: WrittenCluster) -> WrittenCluster:
    """Two environments, of which the second is in use by a job in line."""
    (written.work / "train.py").touch()
    for environment in (ONE, replace(ONE, digest="2" * 64, file="uv.lock")):
        registry.publish(written.store, environment.digest, environment)
        written.store.put(layout.environment_archive(environment.digest, "a" * 64), bytes(3000))
    job = written.run("train", "-d", "train.py").stdout.strip()
    registry.note_use(written.store, "2" * 64, job)
    return written


def test_they_are_listed_with_what_they_take_and_who_used_them(two: WrittenCluster) -> None:
    header, last, first = two.run("env", "ls").stdout.splitlines()
    assert header.split() == ["ENVIRONMENT", "FROM", "PACKAGES", "SIZE", "STORED", "JOBS", "LAST", "USED"]
    assert last.split()[:5] == ["2" * 12, "uv.lock", "2", "12.4", "MB"] and "train-1" in last
    assert first.startswith("1" * 12) and " - " in first
    listed = json.loads(two.run("env", "ls", "-o", "json").stdout)
    assert [(one["environment"], one["packages"], one["jobs"]) for one in listed] == [
        ("2" * 64, ONE.packages, ["train-1"]),
        ("1" * 64, ONE.packages, []),
    ]
    assert listed[0]["stored_bytes"] > 3000


def test_one_is_removed_once_that_is_confirmed(two: WrittenCluster) -> None:
    assert "nothing was removed; confirm with --yes" in two.run("env", "rm", "111", code=2).stderr
    assert "removed 111111111111" in two.run("env", "rm", "-y", "111").stderr
    assert [one.environment.digest for one in registry.listed(two.store)] == ["2" * 64]


def test_one_that_a_job_needs_stays_until_that_is_over(two: WrittenCluster) -> None:
    said = two.run("env", "rm", "-y", "all", code=2).stderr
    assert said == "error: environment 222222222222 is in use by train-1; wait, or: gpuctl cancel train-1\n"
    assert len(registry.listed(two.store)) == 2
    queue.end_as_failed(two.store, "train-1", "no packages")
    two.run("env", "rm", "-y", "all")
    assert two.run("env", "ls").stderr.startswith("no environments yet")


def test_an_unknown_one_is_refused_with_those_that_there_are(two: WrittenCluster) -> None:
    said = two.run("env", "rm", "-y", "xyz", code=2).stderr
    assert said == "error: xyz is not an environment; there are: 222222222222, 111111111111 (gpuctl env ls)\n"
