"""The region that Google's own tools would use: variables, then gcloud's active configuration.

Source: cloud.google.com/sdk/docs/configurations and cloud.google.com/sdk/docs/properties.
"""

from __future__ import annotations

import os
import re
from configparser import ConfigParser, Error
from pathlib import Path

_VARIABLES = ("GOOGLE_REGION", "GCLOUD_REGION", "CLOUDSDK_COMPUTE_REGION")
"""Those of Pulumi's provider first, so that all of gpuctl means the same region."""
_NAME = re.compile(r"[a-z][a-z0-9-]*")
"""Of a configuration, as gcloud takes it; ``NONE`` stands for none."""


def usual_region() -> tuple[str, str]:
    """See ``Cloud``. A file that cannot be read says nothing."""
    for name in _VARIABLES:
        if value := os.environ.get(name):
            return value, name
    return _of_gcloud()


def _of_gcloud() -> tuple[str, str]:
    folder = _folder()
    name = os.environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or _text(folder / "active_config").strip() or "default"
    if not _NAME.fullmatch(name):
        return "", ""
    found = ConfigParser(interpolation=None, strict=False)
    try:
        found.read_string(_text(folder / "configurations" / f"config_{name}"))
    except Error:
        return "", ""
    source = f"gcloud configuration {name}"
    if region := found.get("compute", "region", fallback=""):
        return region, source
    zone = found.get("compute", "zone", fallback="")
    return (zone.rpartition("-")[0], source) if zone.count("-") == 2 else ("", "")


def _folder() -> Path:
    if named := os.environ.get("CLOUDSDK_CONFIG"):
        return Path(named)
    if os.name == "nt":
        return Path(os.environ.get("APPDATA", "")) / "gcloud"
    return Path(os.environ.get("HOME") or "/nonexistent") / ".config" / "gcloud"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return ""
