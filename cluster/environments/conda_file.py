"""``environment.yml``: the packages that it names, read as far as that goes without a channel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuctl.cluster.errors import BadInput

USUAL_CHANNEL = "conda-forge"
"""Where a file names none."""
_PARTS = {"name", "channels", "dependencies", "prefix", "platforms"}


@dataclass(frozen=True, slots=True)
class CondaFile:
    """What the file says."""

    channels: tuple[str, ...]
    """Names or URLs, the one to ask first in front."""
    specs: tuple[str, ...]
    """Packages of conda's."""
    pip: tuple[str, ...]
    """Lines of pip's requirements."""


def read(folder: Path, name: str) -> CondaFile:
    """Read the file ``name`` in ``folder``. Raises ``BadInput`` for one that cannot be used whatever the nodes are."""
    found = _loaded(folder / name, name)
    if not isinstance(found, dict):
        raise BadInput(f"{name} has no dependencies", "list some below `dependencies:`, or use --environment none")
    if unknown := sorted(map(str, found.keys() - _PARTS)):
        raise BadInput(f"{name}: {unknown[0]} has no effect on the nodes", "remove it; variables are given by --env")
    specs: list[str] = []
    pip: list[str] = []
    for one in _list(found, "dependencies", name):
        if isinstance(one, dict) and one.keys() == {"pip"}:
            pip += [str(line) for line in _list(one, "pip", name)]
        elif isinstance(one, str) and one.strip():
            specs.append(one.strip())
        else:
            raise BadInput(f"{name}: {one} is not a package", "write one a line, after a dash")
    specs = [one for one in specs if one != "pip"] if pip else specs  # uv takes its place
    channels = _list(found, "channels", name)
    if wrong := [one for one in channels if not isinstance(one, str)]:
        raise BadInput(f"{name}: {wrong[0]} is not a channel", "write one name or URL a line, after a dash")
    channels = [one for one in channels if one != "nodefaults"]
    return CondaFile(tuple(channels) or (USUAL_CHANNEL,), tuple(specs), tuple(pip))


def _list(found: dict[str, Any], key: str, name: str) -> list[Any]:
    value = found.get(key) or []
    if not isinstance(value, list):
        raise BadInput(f"{name}: {key} is not a list", "write one a line, after a dash")
    return value


def _loaded(path: Path, name: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise BadInput(f"{where}: is not YAML: {getattr(error, 'problem', error)}", "correct the line") from None
