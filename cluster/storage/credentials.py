"""Credentials that obstore does not find by itself: those that a person has logged in with on this machine.

obstore takes a URL's options, then the environment, then the machine's own identity. People have profiles
(``aws sso login``) and ``az login``, or go by the names that Pulumi has; Google's application default credentials it
reads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_AWS_FROM_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_AZURE_FROM_ENVIRONMENT = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_TOKEN",
    "AZURE_CLIENT_ID",
    "AZURE_FEDERATED_TOKEN_FILE",
    "IDENTITY_ENDPOINT",
)
_AZURE_AS_PULUMI = {
    "ARM_CLIENT_ID": "client_id",
    "ARM_CLIENT_SECRET": "client_secret",
    "ARM_TENANT_ID": "tenant_id",
}
"""A service principal, by the names that Pulumi and Terraform know it by."""
_GIVEN = ("access_key_id", "aws_access_key_id", "skip_signature", "account_key", "sas_key", "bearer_token", "token")


def of_this_user(scheme: str, options: Mapping[str, str], env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """More arguments for obstore's ``from_url``; none where it finds credentials, or where nobody has logged in."""
    if any(name in options for name in _GIVEN):
        return {}
    if scheme == "s3" and not any(env.get(name) for name in _AWS_FROM_ENVIRONMENT) and _has_aws_profile(env):
        return _of_aws_profile()
    if scheme == "az" and not any(env.get(name) for name in _AZURE_FROM_ENVIRONMENT):
        if all(env.get(name) for name in _AZURE_AS_PULUMI):
            return {"config": {key: env[name] for name, key in _AZURE_AS_PULUMI.items()}}
        if _has_azure_login(env):
            return {"config": {"use_azure_cli": "true"}}
    return {}


def _has_aws_profile(env: Mapping[str, str]) -> bool:
    home = Path(env.get("HOME") or Path.home()) / ".aws"
    files = (
        env.get("AWS_CONFIG_FILE") or home / "config",
        env.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials",
    )
    return any(Path(file).is_file() for file in files)


def _of_aws_profile() -> dict[str, Any]:
    """It renews itself. Weighs as much as boto3 does to import, 0.3 s."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:  # no boto3: a node, or a user of other clouds
        return {}
    import boto3

    session = boto3.Session()
    return {"credential_provider": Boto3CredentialProvider(session)} if session.get_credentials() else {}


def _has_azure_login(env: Mapping[str, str]) -> bool:
    folder = env.get("AZURE_CONFIG_DIR") or Path(env.get("HOME") or Path.home()) / ".azure"
    return (Path(folder) / "azureProfile.json").is_file() and shutil.which("az", path=env.get("PATH")) is not None
