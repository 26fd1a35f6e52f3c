"""A bucket opened with what a person has logged in with, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.credentials import of_this_user
from tests.fakes.metadata import Service
from tests.fakes.stores import s3


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, no credentials in the environment, and no machine's identity to fall back to."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": str(tmp_path),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def _url(endpoint: str) -> str:
    s3.create(endpoint, "of-a-profile")
    return f"s3://of-a-profile/prefix?endpoint={endpoint}&region=us-east-1"


def test_a_profile_of_aws_opens_the_bucket(home: Path, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"Version": 1, "AccessKeyId": "from-a-profile", "SecretAccessKey": "secret"}
    (home / "said.json").write_text(json.dumps(said))
    (home / "config").write_text(f"[profile mine]\ncredential_process = cat {home}/said.json\n")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    bucket = open_bucket(_url(s3_endpoint), patience_s=2.0)
    bucket.put("a", b"1")
    assert bucket.get("a") == b"1"


def test_credentials_of_the_url_and_of_the_environment_go_before_a_profile(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert of_this_user("s3", {}), "the profile is not seen at all"
    assert of_this_user("s3", {"access_key_id": "mine"}) == {}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    assert of_this_user("s3", {}) == {}


def test_without_a_profile_obstore_looks_by_itself(home: Path) -> None:
    assert not list(home.iterdir())
    assert of_this_user("s3", {}) == of_this_user("gs", {}) == of_this_user("az", {}) == {}


def test_who_is_logged_in_to_azure_is_asked_through_its_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".azure").mkdir()
    (home / ".azure" / "azureProfile.json").write_text("{}")
    program = home / "az"
    program.write_text("#!/bin/sh\n")
    assert of_this_user("az", {}) == {}, "the login is of no use without the program"
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(home))
    assert of_this_user("az", {}) == {"config": {"use_azure_cli": "true"}}
    assert of_this_user("az", {"account_key": "k"}) == {}
    monkeypatch.setenv("AZURE_CLIENT_ID", "1")
    assert of_this_user("az", {}) == {}


def test_a_service_principal_by_pulumis_names_gets_into_the_bucket_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of gpuctl is one user: Pulumi makes the cluster with these."""
    whole = {"ARM_CLIENT_ID": "me", "ARM_CLIENT_SECRET": "secret", "ARM_TENANT_ID": "tenant"}
    given = {"client_id": "me", "client_secret": "secret", "tenant_id": "tenant"}
    assert of_this_user("az", {}, whole) == {"config": given}
    assert of_this_user("az", {}, {**whole, "ARM_CLIENT_SECRET": ""}) == {}
    assert of_this_user("az", {}, {**whole, "AZURE_CLIENT_ID": "another"}) == {}
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    open_bucket("az://container/prefix?account_name=account")  # obstore knows these names


@pytest.mark.usefixtures("home")
def test_a_machine_of_azure_with_several_identities_is_the_one_that_its_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the variable that ``Cloud.node_env`` gives every agent. There is no storage here: a token is all it gets."""
    ours = "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/demo"

    def refused(service: Service) -> str:
        token = f"{service.url}/metadata/identity/oauth2/token"
        url = f"az://box/run?account_name=a&msi_endpoint={token}&endpoint=http://127.0.0.1:9/a&allow_http=true"
        with pytest.raises(GpuctlError) as error:
            open_bucket(url, patience_s=0.0).get("x")
        return str(error.value)

    with Service("azure").running() as service:
        service.identities = (ours, "that of a policy")
        assert "Multiple user assigned identities" in refused(service)
        monkeypatch.setenv("AZURE_MSI_RESOURCE_ID", ours)
        assert "Connection refused" in refused(service)
