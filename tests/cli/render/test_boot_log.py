"""``gpuctl logs --boot``: the tests write what a machine would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import BootReport
from tests.fakes.written_cluster import WrittenCluster


@pytest.fixture
def cluster(tmp_path: Path) -> WrittenCluster:
    return WrittenCluster(tmp_path, f"file://{tmp_path}/bucket")


def booted(cluster: WrittenCluster, node: str, log: bytes, **fields: Any) -> None:
    cluster.store.put(layout.boot_report(node), encode(BootReport(node=node, at=1e9, **fields)))
    cluster.store.put(layout.boot_log(node), log)


def test_a_machine_that_never_became_a_node_tells_what_its_steps_printed_and_why(cluster: WrittenCluster) -> None:
    booted(cluster, "i-1", b"+ apt-get update\nE: no network\n", state="failed", step="docker", reason="exit 100")
    ran = cluster.run("logs", "--boot", "i-1")
    assert ran.stdout == "+ apt-get update\nE: no network\n"
    assert ran.stderr.startswith("i-1 failed at ")
    assert ran.stderr.endswith("in docker: exit 100\n")


def test_a_report_tells_where_the_boot_is_even_before_there_is_a_log(cluster: WrittenCluster) -> None:
    cluster.store.put(layout.boot_report("i-1"), encode(BootReport(node="i-1", state="booting", step="driver")))
    ran = cluster.run("logs", "--boot", "i-1")
    assert ran.stdout == ""
    assert "i-1 was at driver at " in ran.stderr
    booted(cluster, "i-1", b"", state="ready")
    assert "i-1 is ready since " in cluster.run("logs", "--boot", "i-1").stderr


def test_as_json_it_is_one_object(cluster: WrittenCluster) -> None:
    booted(cluster, "i-1", b"one\ntwo \xff\n", state="ready", host_keys=("ssh-ed25519 AAAA",))
    told = json.loads(cluster.run("logs", "--boot", "i-1", "-o", "json").stdout)
    assert (told["node"], told["state"], told["host_keys"]) == ("i-1", "ready", ["ssh-ed25519 AAAA"])
    assert told["log"] == "one\ntwo \N{REPLACEMENT CHARACTER}\n"


def test_an_unknown_node_is_refused_in_one_line_that_names_those_there_are(cluster: WrittenCluster) -> None:
    refused = cluster.run("logs", "--boot", "i-9", code=2).stderr
    assert "no boot report of 'i-9'" in refused
    assert "no machine of this cluster has booted yet" in refused
    booted(cluster, "i-1", b"", state="ready")
    booted(cluster, "i-2", b"", state="ready")
    cluster.store.put(f"boot/{'0' * 64}/gpuctl-0.1.0-py3-none-any.whl", b"no machine")
    assert "there are: i-1, i-2" in cluster.run("logs", "--boot", "i-9", code=2).stderr


@pytest.mark.parametrize("flags", [("j-1",), ("-f",), ("--node", "i-1"), ("--rank", "0"), ("--round", "1")])
def test_what_chooses_among_a_jobs_lines_does_not_go_with_it(cluster: WrittenCluster, flags: tuple[str, ...]) -> None:
    assert "is about a job" in cluster.run("logs", *flags, "--boot", "i-1", code=2).stderr
