"""Which modules a script will import, read from its source, so that a warm interpreter can have them ready.

Nothing of the script is run. Only modules from outside the script's folder count: its own may change with the next job.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

NOT_FORKABLE = frozenset({"tensorflow", "jax", "jaxlib", "horovod", "tensorstore"})
"""Start threads when imported, which a fork would lose."""


def imports_of(script: Path, folder: Path) -> list[str]:
    """Dotted names (``sklearn.datasets``, ``gpuctl.Trainer``) that ``script`` and its neighbours in ``folder`` import
    at the top level, in order of appearance. Unreadable source is passed over: Python itself will complain of it.
    """
    names: dict[str, None] = {}
    seen: set[Path] = set()
    waiting = [script]
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for name in _top_level_imports(path):
            local = _local_file(name, (folder, script.parent))
            if local:
                waiting.append(local)
            elif name.partition(".")[0] not in NOT_FORKABLE:
                names.setdefault(name)
    return list(names)


def preload(names: Iterable[str]) -> list[str]:
    """Import what can be imported and return the rest. A name's last part may be an attribute (``gpuctl.Trainer``)."""
    return [name for name in names if not _import(name)]


def _import(name: str) -> bool:
    parent, _, last = name.rpartition(".")
    try:
        if parent and hasattr(importlib.import_module(parent), last):
            return True
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - a module may do anything at import, exit included; the script will meet it
        return False
    return True


def _top_level_imports(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (node.module if alias.name == "*" else f"{node.module}.{alias.name}" for alias in node.names)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when the module is imported: not the bodies of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))


def _local_file(name: str, folders: Iterable[Path]) -> Path | None:
    first = name.partition(".")[0]
    for folder in folders:
        for candidate in (folder / f"{first}.py", folder / first / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
