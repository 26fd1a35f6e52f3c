"""A shell, and Jupyter, where a job's workers run: its folder, its variables, its packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest

from gpuctl.bootstrap.environments.disk import EnvironmentDisk
from gpuctl.bootstrap.environments.install import build
from gpuctl.bootstrap.environments.install.uv import Uv
from gpuctl.bootstrap.environments.node_environments import OF_JOB
from gpuctl.bootstrap.identity import FILE, NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.environments import Environment, EnvironmentSource, PackedFiles
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.storage.bucket import open_bucket

SOURCE = EnvironmentSource(kind="requirements", file="requirements.txt", digest="a")
SERVER = """
import os, re, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path.endswith("token=" + os.environ["JUPYTER_TOKEN"]) else 403)
        self.end_headers()
        self.wfile.write(os.getcwd().encode())

port = next(int(word.rpartition("=")[2]) for word in sys.argv if word.startswith("--ServerApp.port="))
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Node:
    """A node's folder with one job that was prepared there."""

    def __init__(self, folder: Path, **spec: object) -> None:
        self.folder = folder / "node"
        self.job = self.folder / "jobs" / "train-1"
        (self.job / "code").mkdir(parents=True)
        store = open_bucket((folder / "bucket").as_uri())
        identity = NodeIdentity(node="node-0", address="127.0.0.1", bucket=store.url, env={"OF_NODE": "1"})
        (self.folder / FILE).write_bytes(msgspec.json.encode(identity))
        made = JobSpec(job="train-1", number=1, script="train.py", env={"OF_JOB": "2"}, **spec)  # type: ignore[arg-type]
        store.put(layout.job_spec("train-1"), encode(made))

    def environment(self, **modules: str) -> Path:
        """Give the job an environment with these modules; returns its folder."""
        disk = EnvironmentDisk(self.folder / "environments", print)
        pack = PackedFiles(sha256="", bytes=0)
        with disk.making() as made:
            build.make_empty(made, Uv({"PATH": os.environ["PATH"]}, self.folder / "cache"), what="x")
            for name, text in modules.items():
                (build.site_packages(made) / f"{name}.py").write_text(text)
            found = disk.keep(made, Environment(digest="d1", file="f", packages={}, bytes=1, files=1, pack=pack))
        (self.job / OF_JOB).write_text("d1")
        return found.folder

    def run(self, *words: str, job: str = "train-1", module: str = "job_shell") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"gpuctl.bootstrap.{module}", str(self.folder), job, *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_a_command_has_the_jobs_folder_variables_and_packages(tmp_path: Path) -> None:
    node = Node(tmp_path, environment=SOURCE)
    folder = node.environment(alpha="VALUE = 7\n")
    names = "os.environ['OF_NODE'], os.environ['OF_JOB']"
    code = f"import alpha, os, sys; print(alpha.VALUE, os.getcwd(), sys.prefix, {names})"
    assert node.run("python", "-c", code).stdout == f"7 {node.job / 'code'} {folder} 1 2\n"
    assert node.run("sh", "-c", "exit 7").returncode == 7


def test_a_job_without_packages_has_the_nodes_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    ran = node.run("python", "-c", "import sys, torch; print(sys.prefix)")
    assert ran.stdout == f"{sys.prefix}\n"


@pytest.mark.parametrize(
    ("spec", "job", "words", "code", "message"),
    [
        ({}, "train-2", ["true"], 1, "train-2 has not been prepared on node-0; name another job"),
        ({"environment": SOURCE}, "train-1", ["true"], 1, "the environment of train-1 is not on node-0; wait until"),
        ({"image": "debian"}, "train-1", ["true"], 1, "no container has run on this node, so none of train-1 has"),
        ({}, "train-1", ["no-such-program"], 127, "no-such-program: No such file or directory"),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    tmp_path: Path, spec: dict[str, object], job: str, words: list[str], code: int, message: str
) -> None:
    ran = Node(tmp_path, **spec).run(*words, job=job)
    assert (ran.returncode, ran.stderr.count("\n")) == (code, 1)
    assert ran.stderr.startswith("error: ") and message in ran.stderr


def test_jupyter_runs_there_with_its_token_and_ends_with_the_connection(tmp_path: Path) -> None:
    node = Node(tmp_path, environment=SOURCE)
    node.environment(jupyterlab=SERVER)
    command = [sys.executable, "-m", "gpuctl.bootstrap.jupyter", str(node.folder), "train-1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        process.stdin.write("secret\n")
        process.stdin.flush()
        found = re.match(r"port (\d+)", process.stdout.readline())
        assert found
        url = f"http://127.0.0.1:{found[1]}/lab?token=secret"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert opener.open(url).read().decode() == str(node.job / "code")
        assert "secret" not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.stdin.close()
        assert process.wait(30) == 0
    with pytest.raises(OSError, match="refused"):
        opener.open(url)


def test_without_jupyterlab_it_is_said_where_to_name_it(tmp_path: Path) -> None:
    node = Node(tmp_path, environment=SOURCE)
    node.environment()
    said = node.run(module="jupyter").stderr
    assert said == (
        "error: jupyterlab is not installed where the job runs; add it to the job's requirements.txt and train again\n"
    )
