"""``gpuctl attach``: what this machine then knows of a cluster that was made on another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import PastCluster
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord, SshHost
from tests.fakes.written_cluster import WrittenCluster


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh here: apt-get install openssh-client")
def test_up_goes_on_with_the_machines_that_the_other_one_named(tmp_path: Path, file_url: str) -> None:
    lab = WrittenCluster(tmp_path, file_url, provider="ssh", name="lab")
    lab.env |= {"GPUCTL_STATE_DIR": str(tmp_path / "elsewhere"), "HOME": str(tmp_path)}
    for node, port, dropped in (("lab-0", 1, False), ("lab-1", 2, True)):
        host = SshHost(node=node, target=f"127.0.0.1:{port}", host="127.0.0.1", port=port, dropped=dropped)
        lab.store.put(layout.ssh_host(node), encode(host))
    lab.run("attach", lab.url)
    known = json.loads((tmp_path / "elsewhere" / "clusters" / "lab.json").read_text())
    assert known["hosts"] == ["127.0.0.1:1"]
    said = lab.run("up", "-c", "lab", code=1).stderr.splitlines()  # nothing listens there
    assert said[-1].startswith("error: 1 of 1 machines did not become nodes: ")


def test_what_a_cluster_that_is_down_has_left_is_attached_with_its_identity(tmp_path: Path, file_url: str) -> None:
    lab = WrittenCluster(tmp_path, file_url, name="lab")
    past = PastCluster(name="lab", provider="local", id="1" * 10, owner="kim@lab", ended_at=1_700_000_000.0)
    lab.store.delete([layout.CLUSTER])
    lab.store.put(layout.PAST, encode(past))
    lab.env |= {"GPUCTL_STATE_DIR": str(tmp_path / "elsewhere"), "HOME": str(tmp_path)}
    done = lab.run("attach", lab.url)
    assert "cluster 'lab' of kim@lab, down since 2023-11-14 22:13 UTC" in done.stdout
    assert done.stderr.splitlines()[-1] == "next: gpuctl up --cluster lab"
    known = json.loads((tmp_path / "elsewhere" / "clusters" / "lab.json").read_text())
    assert (known["id"], known["bucket"]) == (past.id, lab.url)


@pytest.mark.slow
def test_who_attached_neither_deposes_local_nodes_nor_takes_their_record(tmp_path: Path, file_url: str) -> None:
    lab = WrittenCluster(tmp_path, file_url, name="lab")
    lab.store.put(layout.CLUSTER, encode(replace(lab.spec, id="1" * 10, owner="kim@lab")))
    lab.store.put(
        layout.node("node-0"), encode(NodeRecord(node="node-0", incarnation="i", beat=1, address="127.0.0.2", port=1))
    )
    lab.submit()
    lab.env |= {"GPUCTL_STATE_DIR": str(tmp_path / "elsewhere"), "HOME": str(tmp_path), "LOGNAME": "jo"}
    lab.run("attach", lab.url)
    before = {entry.key: lab.store.get(entry.key) for entry in lab.store.list("")}
    for words in (["up"], ["up", "--nodes", "3"], ["down", "-y"]):
        line = lab.run(*words, "-c", "lab", code=2).stderr
        assert line == (
            "error: the nodes of 'lab' are processes of kim@lab: node-0; run that there;"
            " `gpuctl status --cluster lab` and `train` work here\n"
        )
    assert {entry.key: lab.store.get(entry.key) for entry in lab.store.list("")} == before
    lab.store.delete([layout.node("node-0")])  # that machine is gone
    assert "cluster lab is down" in lab.run("down", "-y", "-c", "lab").stdout


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path: Path, file_url: str) -> None:
    lab = WrittenCluster(tmp_path, file_url, name="lab")
    done = lab.run("attach", f"{lab.url}-mistyped", code=2)
    assert done.stderr.startswith("error: folder ") and "-mistyped does not exist" in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("mistyped")]


def test_without_ssh_it_is_said_what_to_install_and_nothing_is_made(tmp_path: Path, file_url: str) -> None:
    lab = WrittenCluster(tmp_path, file_url, provider="ssh", name="lab")
    state = tmp_path / "elsewhere"
    lab.env |= {"GPUCTL_STATE_DIR": str(state), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    up = ("up", "-c", "new", "--provider", "ssh", "--hosts", "127.0.0.1:1", "--bucket", f"file://{tmp_path}/new")
    said = lab.run(*up, code=1).stderr.splitlines()
    assert said[-1] == (
        "error: `ssh` is not installed on this machine; install OpenSSH's client: apt-get install openssh-client"
    )
    assert not (tmp_path / "new").exists() and not (state / "clusters").exists()
