"""``gpuctl up --dry-run`` on the clouds: offline, without credentials and without the Pulumi CLI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.cli.session.rental_plan import MachineFlags, request_of
from gpuctl.cli.settings.resolve import load
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster

_OF_A_USER = ("GPUCTL_", "AWS_", "PULUMI_", "CLOUDSDK_", "GOOGLE_", "AZURE_")
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f ada@here\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Without a key, a cloud's configuration or a PATH on which a pulumi could lie."""
    return tmp_path


def run(home: Path, *args: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_USER)}
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "up", "--dry-run", *args],
        env={**kept, "HOME": str(home), "PATH": "/nowhere", "GPUCTL_STATE_DIR": str(home / "state"), **variables},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "machine", "token"),
    [
        ("aws", "p4d.24xlarge", "aws:autoscaling/group:Group"),
        ("gcp", "a2-highgpu-8g", "gcp:compute/instanceGroupManager:InstanceGroupManager"),
        ("azure", "Standard_ND96asr_v4", "azure-native:compute:VirtualMachineScaleSet"),
    ],
)
def test_the_plan_shows_resources_price_and_what_was_not_checked(
    home: Path, provider: str, machine: str, token: str
) -> None:
    key = home / "key.pub"
    key.write_text(KEY)
    asked = ["--provider", provider, "--nodes", "4", "--gpu", "A100", "--gpus", "8", "--ssh-key", str(key)]
    done = run(home, *asked)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"4 x {machine} (8 A100-40GB, spot) in ")
    assert f"1  {token}" in done.stdout
    assert "a day (prices of 20" in lines[-1]
    assert lines[-1].endswith("; not included: what the bucket holds, and traffic")
    assert any(line.startswith("disks: $") for line in lines)
    assert "not checked: credentials and permissions, quotas" in done.stderr
    told = json.loads(run(home, *asked, "-o", "json").stdout)
    assert told["counts"][token] == 1
    assert {one["type"] for one in told["resources"]} >= {token}
    assert told["request"]["type"] == machine
    assert not (home / "state").exists(), "nothing was made, and nothing is remembered"


def test_a_cluster_stays_at_its_bucket_in_another_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of the one that gpuctl makes has the region in it."""
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "gpuctl.yaml").write_text("bucket: s3://of-another-project/runs\n")
    monkeypatch.chdir(tmp_path)
    before = StackRequest(
        cluster="default", provider="aws", type="g5.xlarge", nodes_min=1, nodes_max=1, region="us-east-1"
    )
    last = LastRequest(request=before, terms=NodeOptions())

    def url(*flags: str, region: str) -> str:
        settings = load({"provider": "aws"} | dict(zip(flags[::2], flags[1::2], strict=True)))
        return request_of(settings, "aws", MachineFlags(region=region), last).bucket_url()

    assert url(region="us-east-1") == url(region="us-west-2") == before.bucket_url()
    said = capsys.readouterr().err
    assert "stays in us-east-1; from us-west-2 it is slower" in said and "not that of gpuctl.yaml:1" in said
    assert url("bucket", "s3://mine/x", region="us-east-1") == "s3://mine/x?region=us-east-1"
    monkeypatch.setenv("GPUCTL_BUCKET", "gs://of-another-cloud/runs")
    assert url(region="us-east-1") == before.bucket_url()
    assert "as before, not that of GPUCTL_BUCKET" in capsys.readouterr().err


@pytest.mark.slow
def test_a_type_and_a_zone_are_taken_as_they_are_named(home: Path) -> None:
    asked = ["--provider", "aws", "--nodes", "2", "--type", "g5.xlarge", "--zone", "eu-west-1b", "--on-demand"]
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id_ed25519.pub").write_text(KEY)
    done = run(home, *asked, "--ssh-from", "203.0.113.7/32")
    assert done.stdout.startswith("2 x g5.xlarge (1 A10G, on demand) in eu-west-1b, aws\n")
    assert "no SSH access" not in done.stderr


def region(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("region: ")]
    return line.removeprefix("region: ")


@pytest.mark.slow
def test_the_region_goes_by_one_rule_and_is_told(home: Path) -> None:
    g5 = ("--provider", "aws", "--type", "g5.xlarge")
    (home / "gpuctl.yaml").write_text("region: eu-west-1\n")
    assert region(run(home, *g5, AWS_REGION="us-west-2")) == "eu-west-1 (gpuctl.yaml:1)"
    assert region(run(home, *g5, GPUCTL_REGION="eu-west-2")) == "eu-west-2 (GPUCTL_REGION)"
    assert region(run(home, *g5, "--region", "eu-north-1", GPUCTL_REGION="eu-west-2")) == "eu-north-1 (--region)"
    assert region(run(home, *g5, "--zone", "eu-west-3b")) == "eu-west-3 (--zone eu-west-3b)"
    (home / "gpuctl.yaml").unlink()
    assert region(run(home, *g5, AWS_REGION="us-west-2")) == "us-west-2 (AWS_REGION)"
    assert region(run(home, *g5)) == "us-east-1 (the default)"


@pytest.mark.slow
def test_an_attached_cluster_stays_in_its_region(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bucket is there, with what its jobs have left."""
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(home / "state"))
    url = "s3://gpuctl-default/default?region=eu-west-1"
    clusters.remember(KnownCluster(name="default", provider="aws", bucket=url, id="1" * 10, region="eu-west-1"))
    g5 = ("--type", "g5.xlarge")
    (home / "gpuctl.yaml").write_text("region: eu-west-3\n")
    assert region(run(home, *g5, AWS_REGION="us-west-2")) == "eu-west-1 (where the cluster is)"
    assert region(run(home, *g5, "--region", "eu-west-2")) == "eu-west-2 (--region)"
    assert region(run(home, *g5, "-c", "other", "--provider", "aws")) == "eu-west-3 (gpuctl.yaml:1)"


@pytest.mark.slow
def test_the_cheapest_of_several_regions_is_taken_and_told(home: Path) -> None:
    asked = ("--provider", "gcp", "--gpu", "A100", "--gpus", "8", "--region", "us-central1,europe-west4")
    done = run(home, *asked)
    where = region(done)
    assert where.endswith(" (--region: the cheapest of us-central1, europe-west4)")
    other = {"us-central1", "europe-west4"} - {where.split()[0]}
    assert f"also considered: a2-highgpu-8g in {other.pop()} ($" in done.stderr


@pytest.mark.slow
def test_one_gpu_of_a_kind_is_taken_unless_more_are_asked_for(home: Path) -> None:
    done = run(home, "--provider", "gcp", "--gpu", "L4")
    assert done.stdout.startswith("1 x g2-standard-4 (1 L4, spot) in us-central1, gcp\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--provider", "aws", "--type", "p4.24xlarge"], "unknown instance type 'p4.24xlarge' on aws"),
        (["--provider", "gcp", "--type", "p4d.24xlarge"], "unknown instance type 'p4d.24xlarge' on gcp"),
        (
            ["--provider", "aws", "--type", "p4d.24xlarge", "--region", "us-east-1", "--zone", "us-west-2a"],
            "zone us-west-2a is not in us-east-1; for example us-east-1a",
        ),
        (["--provider", "aws", "--gpu", "TPU"], "no matching machine is available as spot"),
        (
            ["--provider", "gcp", "--gpu", "T4"],
            "price not available in us-central1 for n1-standard-4+t4x1 and 1 more; name one with --type, or: gpuctl "
            "offers --refresh --provider gcp --region us-central1",
        ),
        (
            ["--provider", "gcp", "--region", "us-west2", "--gpu", "L4"],
            "no matching machine is available in us-west2; available",
        ),
        (["--provider", "azure", "--region", "eastusa"], "unknown region 'eastusa'; did you mean eastus"),
        (["--provider", "aws", "--region", "us-esat-1"], "unknown region 'us-esat-1'; did you mean us-east-1"),
        (["--provider", "aws", "--zone", "us-esat-1a"], "unknown region 'us-esat-1'; did you mean us-east-1"),
        (["--provider", "aws", "--type", "g5.xlarge", "--gpus", "1"], "--type already chooses the machine"),
        (["--provider", "aws", "--type", "g5.xlarge", "--ssh-from", "0.0.0.0/0"], "0.0.0.0/0 allows everybody"),
        (["--provider", "aws", "--type", "g5.xlarge", "--ssh-key", "/no/key"], "--ssh-key /no/key cannot be read"),
        ([], "--dry-run applies to clouds only, not to provider local; use --provider aws, gcp or azure"),
    ],
)
def test_bad_input_is_one_line(home: Path, args: list[str], said: str) -> None:
    last = run(home, *args, code=2).stderr.splitlines()[-1]
    assert last.startswith(f"error: {said}"), last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (
            ["--provider", "aws", "--type", "g5.xlarge", "--image", "ubuntu:22.04"],
            "for example ami-0123456789abcdef0; a container image is for gpuctl train --image",
        ),
    ],
)
def test_a_problem_is_told_once_with_what_to_do(home: Path, args: list[str], hint: str) -> None:
    said = run(home, *args, code=2).stderr
    assert said.count(hint) == 1
    assert said.splitlines()[-1] == "error: 1 problem to fix first; see above"
    assert hint in run(home, *args, "-o", "json", code=2).stderr.splitlines()[-1]


@pytest.mark.slow
def test_who_may_log_in_has_a_key_to_do_so(home: Path) -> None:
    """The usual ones, in order; without ``--ssh-from`` none is asked for."""
    asked = ["--provider", "aws", "--type", "g5.xlarge"]
    assert "no key to log in with" not in run(home, *asked).stderr
    asked += ["--ssh-from", "203.0.113.7"]
    assert f"your SSH key (`up` makes one, {home}/state/ssh/id_ed25519)" in run(home, *asked).stderr
    assert not (home / "state").exists(), "a plan makes none"
    ssh = home / ".ssh"
    ssh.mkdir()
    (ssh / "id_ed25519.pub").write_text("half a k")
    rsa = made(ssh / "id_rsa", "-t", "rsa", "-b", "2048")
    assert _ssh_key(run(home, *asked, "-o", "json")) == rsa
    (ssh / "id_ed25519").unlink(missing_ok=True)
    ed25519 = made(ssh / "id_ed25519", "-t", "ed25519")
    assert _ssh_key(run(home, *asked, "-o", "json")) == ed25519


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "machine", "kind", "said"),
    [
        ("aws", "g5.xlarge", ("-t", "ecdsa"), "AWS takes RSA and ED25519 keys, not ecdsa-sha2-nistp256"),
        (
            "azure",
            "Standard_ND96asr_v4",
            ("-t", "ecdsa"),
            "Azure takes RSA and ED25519 keys, not ecdsa-sha2-nistp256",
        ),
        (
            "azure",
            "Standard_ND96asr_v4",
            ("-t", "rsa", "-b", "1024"),
            "Azure takes RSA keys of 2048 bits or more, and this",
        ),
        ("azure", "Standard_ND96asr_v4", ("-t", "rsa", "-b", "2048"), ""),
        ("azure", "Standard_ND96asr_v4", ("-t", "ed25519"), ""),
        ("aws", "g5.xlarge", ("-t", "rsa", "-b", "3072"), ""),
        ("gcp", "a2-highgpu-1g", ("-t", "ecdsa"), ""),
    ],
)
def test_a_key_that_a_cloud_does_not_take_stops_the_plan(
    home: Path, provider: str, machine: str, kind: tuple[str, ...], said: str
) -> None:
    made(home / "key", *kind)
    asked = ["--provider", provider, "--type", machine, "--ssh-key", str(home / "key.pub")]
    done = run(home, *asked, code=2 if said else 0)
    assert f"error: {said}" in done.stderr if said else "error:" not in done.stderr
    if said:
        assert done.stderr.count("; create another: ssh-keygen -t") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{private}", "is a private key; give its public key, such as"),
        ("{public}{other}", "holds 2 keys, but machines take one; give a file"),
        ('from="10.0.0.1",no-pty {public}', "has options before its key, as in authorized_keys; leave them out"),
        (
            "---- BEGIN SSH2 PUBLIC KEY ----\nAAAA\n---- END SSH2 PUBLIC KEY ----\n",
            "is not in OpenSSH's format; convert",
        ),
        (
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKuS6V",
            "is not a public key; give a file such as ~/.ssh/id_ed25519.pub",
        ),
        ("ssh-ed25519", "is not a public key; give a file"),
        ("hello", "is not a public key; give a file"),
        ("", "is empty; give a file"),
    ],
)
def test_a_file_that_is_not_one_public_key_is_one_line(home: Path, text: str, said: str) -> None:
    public, other = made(home / "one", "-t", "ed25519"), made(home / "two", "-t", "ed25519")
    private = (home / "one").read_text()
    (home / "named").write_text(text.format(private=private, public=f"{public}\n", other=f"{other}\n"))
    done = run(home, "--provider", "aws", "--type", "g5.xlarge", "--ssh-key", str(home / "named"), code=2)
    assert done.stderr.splitlines()[-1].startswith(f"error: {home}/named {said}"), done.stderr


@pytest.mark.slow
def test_a_key_with_a_line_end_of_windows_is_taken_without_it(home: Path) -> None:
    public = made(home / "one", "-t", "ed25519")
    (home / "named").write_bytes(f"# mine\r\n{public}\r\n".encode())
    asked = ["--provider", "aws", "--type", "g5.xlarge", "--ssh-key", str(home / "named"), "-o", "json"]
    assert _ssh_key(run(home, *asked)) == public


def made(path: Path, *kind: str) -> str:
    """The public half of a new key at ``path``, as ssh-keygen writes it."""
    if not shutil.which("ssh-keygen"):
        pytest.skip("no ssh-keygen here: apt-get install openssh-client")
    path.with_suffix(".pub").unlink(missing_ok=True)
    command = ("ssh-keygen", "-q", *kind, "-N", "", "-C", "ada@here", "-f", str(path))
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
    return path.with_suffix(".pub").read_text().strip()


def _ssh_key(done: subprocess.CompletedProcess[str]) -> str:
    found: str = json.loads(done.stdout)["request"]["ssh_key"]
    return found
