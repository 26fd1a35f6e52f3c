"""``gpuctl up --dry-run`` on the clouds: offline, without credentials and without the Pulumi CLI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Without a key, a cloud's configuration or a PATH on which a pulumi could lie."""
    return tmp_path


def run(home: Path, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUCTL_", "AWS_", "PULUMI_"))}
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "up", "--dry-run", *args],
        env={**kept, "HOME": str(home), "PATH": "/nowhere", "GPUCTL_STATE_DIR": str(home / "state")},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


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
    key.write_text("ssh-ed25519 AAAA ada@here\n")
    asked = ["--provider", provider, "--nodes", "4", "--gpu", "A100", "--gpus", "8", "--ssh-key", str(key)]
    done = run(home, *asked)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"4 x {machine} (8 A100-40GB, spot) in ")
    assert f"1  {token}" in done.stdout
    assert "a day (prices of 20" in lines[-1]
    assert "not checked: credentials and permissions, quotas" in done.stderr
    told = json.loads(run(home, *asked, "-o", "json").stdout)
    assert told["counts"][token] == 1
    assert {one["type"] for one in told["resources"]} >= {token}
    assert told["request"]["type"] == machine
    assert not (home / "state").exists(), "nothing was made, and nothing is remembered"


def test_a_type_and_a_zone_are_taken_as_they_are_named(home: Path) -> None:
    asked = ["--provider", "aws", "--nodes", "2", "--type", "g5.xlarge", "--zone", "eu-west-1b", "--on-demand"]
    done = run(home, *asked, "--ssh-from", "203.0.113.7/32")
    assert done.stdout.startswith("2 x g5.xlarge (1 A10G, on demand) in eu-west-1b, aws\n")
    assert "nobody may log in" not in done.stderr


def test_a_machine_that_may_be_cheaper_is_told_of_where_nobody_knows_its_price(home: Path) -> None:
    said = "note: nobody has told the price of n1-standard-4+t4x1 and "
    (line,) = [
        line for line in run(home, "--provider", "gcp", "--gpus", "1").stderr.splitlines() if line.startswith(said)
    ]
    assert line.endswith("may be cheaper; gpuctl offers --refresh --provider gcp --region us-central1")
    assert said not in run(home, "--provider", "gcp", "--gpu", "A100").stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--provider", "aws", "--type", "p4.24xlarge"], "'p4.24xlarge' is no instance type of aws that gpuctl knows"),
        (["--provider", "gcp", "--type", "p4d.24xlarge"], "'p4d.24xlarge' is no instance type of gcp"),
        (
            ["--provider", "aws", "--type", "p4d.24xlarge", "--region", "us-east-1", "--zone", "us-west-2a"],
            "zone us-west-2a is not in us-east-1; such as us-east-1a",
        ),
        (["--provider", "aws", "--gpu", "TPU"], "nothing that gpuctl knows to be sold as spot fits"),
        (
            ["--provider", "gcp", "--gpu", "L4", "--gpus", "1"],
            "g2-standard-4 and 4 more fit, but nobody has told their price in us-central1; name one with --type, or: "
            "gpuctl offers --refresh --provider gcp --region us-central1",
        ),
        (["--provider", "gcp", "--region", "europe-west4", "--gpu", "L4"], "g2-standard-4 and 7 more fit, but nobody"),
        (["--provider", "aws", "--type", "g5.xlarge", "--gpus", "1"], "--type names the machine already"),
        (["--provider", "aws", "--type", "g5.xlarge", "--ssh-from", "0.0.0.0/0"], "0.0.0.0/0 is everybody"),
        (["--provider", "aws", "--type", "g5.xlarge", "--ssh-key", "/no/key"], "--ssh-key /no/key cannot be read"),
        (["--provider", "azure", "--gpu", "A100"], "1 thing would stop this; --ssh-key names a public key"),
        ([], "--dry-run is for clouds; add --provider, one of: aws, gcp, azure"),
    ],
)
def test_bad_input_is_one_line(home: Path, args: list[str], said: str) -> None:
    last = run(home, *args, code=2).stderr.splitlines()[-1]
    assert last.startswith(f"error: {said}"), last
