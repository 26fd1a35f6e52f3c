"""The reference of what is in the bucket: the keys of ``cluster/layout.py``, and each record with its fields, from the
source itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from gpuctl.cluster import layout

RECORDS = Path(__file__).resolve().parents[2] / "cluster" / "records"
MODULES = ("clusters", "nodes", "jobs", "environments", "images", "rounds", "checkpoints", "snapshots", "runs")
"""In the order of reading."""


def keys_as_markdown() -> str:
    """The table of keys, as it stands in the docstring of ``layout``."""
    return f"```text\n{layout_table()}\n```"


def layout_table() -> str:
    """
    >>> layout_table().splitlines()[0].split()
    ['cluster.json', 'ClusterSpec']
    """
    indented = (layout.__doc__ or "").partition("::\n")[2].strip("\n")
    return "\n".join(line.removeprefix("    ") for line in indented.splitlines())


def records_as_markdown() -> str:
    """Every record: what it says of itself, and its fields."""
    return "\n\n".join(text for module in MODULES for text in _records_of(RECORDS / f"{module}.py"))


def _records_of(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    yield f"## {path.stem.capitalize()}"
    yield (ast.get_docstring(tree) or "").replace("What is written of", "Records of")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Struct" in ast.unparse(base) for base in node.bases):
            yield f"### {node.name}"
            yield _text(ast.get_docstring(node) or "")
            yield "\n".join(("| Field | Type | Default | |", "|---|---|---|---|", *_rows(node)))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            yield f"**{ast.unparse(node.targets[0])}** is one of {_values(node.value)}."


def _rows(record: ast.ClassDef) -> Iterator[str]:
    fields = record.body
    for at, node in enumerate(fields):
        if isinstance(node, ast.AnnAssign):
            default = f"`{ast.unparse(node.value)}`" if node.value else ""
            after = fields[at + 1] if at + 1 < len(fields) else None
            kind = ast.unparse(node.annotation)
            yield f"| `{ast.unparse(node.target)}` | `{kind}` | {default} | {_text(_said(after))} |"


def _said(node: ast.stmt | None) -> str:
    """The docstring that ``node`` is, in one line; empty if it is something else."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _values(literal: ast.Subscript) -> str:
    return ", ".join(f"`{value}`" for value in ast.literal_eval(literal.slice))


def _text(text: str) -> str:
    """A docstring as Markdown: without its pointers into the code, and its double backticks are code there too."""
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r" \(see ``[^)]*\)", "", text)).replace("|", "\\|")
