"""The region that Azure's own tools would use, from variables and ``az``'s file alone."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

_VARIABLES = ("AZURE_DEFAULTS_LOCATION", "ARM_LOCATION", "AZURE_LOCATION")
"""Of ``az`` (learn.microsoft.com, "Azure CLI configuration": AZURE_{section}_{name}, before its file), beside the other
``ARM_`` variables (neither Pulumi nor Terraform reads this one, people's scripts do), and of ``azd``."""


def usual_region() -> tuple[str, str]:
    """See ``Cloud.usual_region``. A file that cannot be read says nothing: it is ``az``'s to complain of it."""
    for name in _VARIABLES:
        if told := _plain(os.environ.get(name, "")):
            return told, name
    path = Path(os.environ.get("AZURE_CONFIG_DIR") or Path.home() / ".azure") / "config"
    config = configparser.ConfigParser(interpolation=None)
    try:
        config.read(path, "utf-8-sig")
        told = _plain(config.get("defaults", "location", fallback=""))
    except (configparser.Error, OSError, UnicodeDecodeError):
        return "", ""
    return (told, _short(path)) if told else ("", "")


def _plain(region: str) -> str:
    """``East US``, as ``az`` takes it too, is ``eastus``."""
    return region.replace(" ", "").lower()


def _short(path: Path) -> str:
    """A region's short name, as people write it."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)
