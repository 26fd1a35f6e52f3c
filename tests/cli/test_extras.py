"""gpuctl without its extras: each verb that needs one says so in a line, and names all providers there are.

The verbs run with an import hook that hides a package; a fork for each keeps it quick.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster
from tests.fakes.requests import asked

_PACKAGES: dict[str, tuple[str, ...]] = {
    "aws": ("pulumi", "pulumi_aws", "boto3"),
    "gcp": ("pulumi", "pulumi_gcp", "google"),
    "azure": ("pulumi", "pulumi_azure_native", "azure"),
}
_RUNS = """
import json, os, sys, tempfile
from gpuctl.cli.main import run

class Hidden:
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in self.names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def one(args, hidden):
    with tempfile.TemporaryFile("w+") as told:
        pid = os.fork()
        if pid == 0:
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
            sys.meta_path.insert(0, Hidden(hidden))
            code = 70
            try:
                code = run(args)
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        told.seek(0)
        return code, told.read()

for args, hidden in json.load(sys.stdin):
    print(json.dumps([args, hidden, *one(args, hidden)]))
"""


def verbs(cloud: str) -> list[list[str]]:
    name = ["--cluster", f"of-{cloud}"]
    return [
        ["up", "--provider", cloud, "--dry-run"],
        ["up", "--provider", cloud, "-y"],
        ["check", "--provider", cloud],
        ["leaks", "--provider", cloud, "--region", "nowhere"],
        ["buckets", "ls", "--provider", cloud, "--region", "nowhere"],
        ["buckets", "rm", "b", "-y", "--provider", cloud, "--region", "nowhere"],
        ["down", "--by-tag", "x", "-y", "--provider", cloud, "--region", "nowhere"],
        ["offers", "--refresh", "--provider", cloud, "--region", regions.USUAL[cloud]],
        ["repair", *name],
        ["down", "-y", *name],
    ]


def run_each(runs: list[tuple[list[str], tuple[str, ...]]]) -> list[tuple[list[str], list[str], int, str]]:
    # Nothing is to be asked of any cloud: a proxy that is not there answers for all of them.
    env = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    env |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RUNS], input=json.dumps(runs), capture_output=True, text=True, timeout=170, env=env
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def make_known(name: CloudName, folder: Path) -> None:
    """A cluster of that cloud, as far as this machine can tell."""
    cluster = f"of-{name}"
    bucket = open_bucket(f"file://{folder}/{cluster}")
    bucket.put(layout.CLUSTER, encode(ClusterSpec(name=cluster, provider=name, nodes_min=1, nodes_max=1)))
    clusters.remember(KnownCluster(name=cluster, provider=name, bucket=bucket.url))
    last_request.remember(LastRequest(request=replace(asked(name), cluster=cluster), terms=NodeOptions()))


@pytest.mark.slow
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_missing_package_is_one_line_in_every_verb(
    cloud: CloudName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    make_known(cloud, tmp_path)
    packages = _PACKAGES[cloud]
    hides: list[tuple[str, ...]] = [*((one,) for one in packages), packages]
    runs = [(args, hidden) for args in verbs(cloud) for hidden in hides if needs_one_of(args, hidden)]
    found = run_each(runs)
    assert len(found) == len(runs) > len(verbs(cloud))
    for args, hidden, code, said in found:
        assert code in (0, 1, 2) and "Traceback" not in said, (args, hidden, said)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "which is not installed; pip install 'gpuctl-spot[" in errors[0], (args, said)
        assert f"gpuctl-spot[{cloud}]" in errors[0]


def needs_one_of(args: list[str], hidden: tuple[str, ...]) -> bool:
    """Others would go on to ask a cloud."""
    declares = any(name.startswith("pulumi") for name in hidden)
    asks = any(not name.startswith("pulumi") for name in hidden)
    if args[0] == "up":
        return declares
    if args[0] in ("check", "leaks", "buckets", "down"):  # without Pulumi, down removes by tag
        return asks
    if args[0] == "offers":
        return asks and "azure" not in hidden  # whose price list is open to all
    return "pulumi" in hidden


@pytest.mark.parametrize("verb", [["up"], ["check"], ["offers"], ["offers", "--refresh"], ["leaks"], ["buckets", "ls"]])
def test_an_unknown_provider_is_refused_with_all_names(verb: list[str]) -> None:
    ((_, _, code, said),) = run_each([([*verb, "--provider", "awss"], ())])
    line = "error: unknown provider 'awss'; did you mean aws? (there are: local, ssh, aws, gcp, azure)\n"
    assert (code, said) == (2, line)


def test_dry_run_of_an_unknown_provider_names_the_provider() -> None:
    ((_, _, code, said),) = run_each([(["up", "--provider", "digitalocean", "--dry-run"], ())])
    line = "error: unknown provider 'digitalocean'; use one of: local, ssh, aws, gcp, azure\n"
    assert (code, said) == (2, line)
