"""The region that Amazon's own tools would use: by variables, then by the profile, without boto3 and without a request.

The order is that of the AWS CLI: docs.aws.amazon.com/cli/latest/userguide/cli-configure-files.html.
"""

from __future__ import annotations

import os
import shlex
from configparser import Error, RawConfigParser
from pathlib import Path


def usual_region() -> tuple[str, str]:
    """See ``Cloud``. A file that cannot be read names no region: who asks AWS is told what is wrong."""
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if region := os.environ.get(variable, "").strip():
            return region, variable
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    # As botocore does: what the file of credentials says of a profile goes before what the other one does.
    for variable, usual in (
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        ("AWS_CONFIG_FILE", "~/.aws/config"),
    ):
        named = os.environ.get(variable) or usual
        if region := _region(named, profile, prefixed=variable == "AWS_CONFIG_FILE"):
            return region, f"profile {profile} in {named}"
    return "", ""


def _region(path: str, profile: str, *, prefixed: bool) -> str:
    parsed = RawConfigParser(strict=False)
    try:
        parsed.read_string(Path(path).expanduser().read_text())
    except (OSError, ValueError, RuntimeError, Error):  # not there, not text, no home, no such format
        return ""
    for section in parsed.sections():
        if _profile(section, prefixed=prefixed) == profile:
            return parsed.get(section, "region", fallback="").strip()
    return ""


def _profile(section: str, *, prefixed: bool) -> str:
    """The profile that a section is of: ``[profile research]``, ``[profile "two words"]``, ``[default]``; empty: of
    none."""
    try:
        words = shlex.split(section)
    except ValueError:
        return ""
    if not prefixed:
        return section
    if words == ["default"]:
        return "default"
    return words[1] if len(words) == 2 and words[0] == "profile" else ""
