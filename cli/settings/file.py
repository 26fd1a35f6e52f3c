"""``gpuctl.yaml``: found, read, and refused with the line at fault.

Values stay text here, with the line they came from: ``2:4`` is a number of nodes to us and a sexagesimal 124 to YAML.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuctl.cluster.errors import BadInput

NAME = "gpuctl.yaml"


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value, and the file and line it comes from."""

    text: str
    where: str
    """Such as ``gpuctl.yaml:3``."""


def nearest(folder: Path) -> Path | None:
    """The ``gpuctl.yaml`` of ``folder`` or of the closest folder above it. Raises ``BadInput``."""
    found = next((path / NAME for path in [folder, *folder.parents] if os.path.lexists(path / NAME)), None)
    if found and not found.is_file():
        raise BadInput(f"{found} is not a readable file", "fix or delete it")
    return found


def read(path: Path, keys: Collection[str], maps: Collection[str]) -> dict[str, SourcedValue]:
    """The values in ``path``, those of a map under ``key.name``. ``maps``: the keys whose value is a map.

    Raises ``BadInput`` naming the line and the key.
    """
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        key = _key_at(path, line)
        raise _bad(path, line, f"{key}not YAML: {error.problem or error.context}", "fix that line") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _bad(path, 1, "not a YAML text file", "see examples/gpuctl.yaml") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", "fix its permissions") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _bad(path, 1, f"expected keys such as `nodes: 4`, not {_kind(root)}", "see examples/gpuctl.yaml")
    found: dict[str, SourcedValue] = {}
    for key, line, value in _pairs(path, root):
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are: {', '.join(keys)}"
            raise _bad(path, line, f"unknown key {key!r}", hint)
        if _is_null(value):
            continue
        if key in maps:
            for name, at, inner in _pairs(path, _expect(path, line, key, value, yaml.MappingNode, "a map of K: V")):
                found[f"{key}.{name}"] = _line(path, at, f"{key}.{name}", inner)
        else:
            found[key] = _line(path, line, key, value)
    return found


def _pairs(path: Path, node: Any) -> Iterator[tuple[str, int, Any]]:
    seen: set[str] = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = str(key.value)
        if name in seen:
            raise _bad(path, line, f"{name!r} is given twice", "keep one of them")
        seen.add(name)
        yield name, line, value


def _line(path: Path, line: int, key: str, value: Any) -> SourcedValue:
    import yaml

    scalar = _expect(path, line, key, value, yaml.ScalarNode, "a single value")
    return SourcedValue("" if _is_null(scalar) else str(scalar.value), f"{path.name}:{line}")


def _is_null(node: Any) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _expect(path: Path, line: int, key: str, value: Any, kind: Any, what: str) -> Any:
    if isinstance(value, kind):
        return value
    raise _bad(path, line, f"{key} must be {what}, not {_kind(value)}", "see examples/gpuctl.yaml")


def _kind(node: Any) -> str:
    return {"SequenceNode": "a list", "MappingNode": "a map"}.get(type(node).__name__, f"{node.value!r}")


def _key_at(path: Path, line: int) -> str:
    """The key at or above a line that YAML cannot read, with a colon; empty if there is none."""
    for text in reversed(path.read_text(encoding="utf-8").splitlines()[:line]):
        key, colon, _ = text.partition(":")
        if colon and key.strip() and not text.lstrip().startswith("#"):
            return f"{key.strip()}: "
    return ""


def _bad(path: Path, line: int, what: str, hint: str) -> BadInput:
    return BadInput(f"{path.name}:{line}: {what}", f"{hint} ({path})")
