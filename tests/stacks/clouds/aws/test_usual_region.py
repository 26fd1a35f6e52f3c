"""The region that Amazon's own tools would use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.stacks.clouds.aws.usual_region import usual_region


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, and nothing of AWS in the environment."""
    for name in ("REGION", "DEFAULT_REGION", "PROFILE", "DEFAULT_PROFILE", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    return tmp_path


def configured(home: Path, text: str, file: str = "config") -> None:
    (home / ".aws" / file).write_text(text)


CONFIG = """
[default]
region = eu-central-1
[profile research]
region = us-west-2
s3 =
  max_concurrent_requests = 20
[profile "two words"]
region = ap-south-1
[sso-session research]
sso_region = us-east-1
"""


def test_nothing_said_is_no_region() -> None:
    assert usual_region() == ("", "")


def test_variables_go_before_the_profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(home, CONFIG)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert usual_region() == ("eu-west-1", "AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert usual_region() == ("eu-west-2", "AWS_REGION")
    monkeypatch.setenv("AWS_REGION", "")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert usual_region() == ("eu-central-1", "profile default in ~/.aws/config")


@pytest.mark.parametrize(
    ("profile", "region"), [("research", "us-west-2"), ("two words", "ap-south-1"), ("nobody", "")]
)
def test_the_profile_that_is_named_counts(
    home: Path, monkeypatch: pytest.MonkeyPatch, profile: str, region: str
) -> None:
    configured(home, CONFIG)
    monkeypatch.setenv("AWS_PROFILE", profile)
    assert usual_region() == ((region, f"profile {profile} in ~/.aws/config") if region else ("", ""))


def test_another_file_is_read_where_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "mine"))
    assert usual_region() == ("eu-central-1", f"profile default in {tmp_path / 'mine'}")


def test_a_region_beside_the_keys_counts_too(home: Path) -> None:
    configured(home, "[default]\naws_access_key_id = a\nregion = sa-east-1\n", "credentials")
    assert usual_region() == ("sa-east-1", "profile default in ~/.aws/credentials")


@pytest.mark.parametrize("text", ["region = us-west-2", "[default", '[profile "x]\nregion = a', "\x00", "[default]\nq"])
def test_a_broken_file_names_no_region(home: Path, text: str) -> None:
    configured(home, text)
    assert usual_region() == ("", "")
    (home / ".aws" / "config").write_bytes(b"\xff\xfe[default]")
    assert usual_region() == ("", "")


def test_it_brings_no_boto3() -> None:
    code = (
        "import sys, gpuctl.stacks.clouds.aws.usual_region as it; it.usual_region(); sys.exit('boto3' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_botocore_reads_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    configured(home, CONFIG)
    for profile in ("default", "research", "two words"):
        monkeypatch.setenv("AWS_PROFILE", profile)
        assert usual_region()[0] == boto3.Session().region_name
    configured(home, "[research]\nregion = sa-east-1\n", "credentials")
    monkeypatch.setenv("AWS_PROFILE", "research")
    assert usual_region()[0] == boto3.Session().region_name == "sa-east-1"
