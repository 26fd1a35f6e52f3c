"""What MkDocs calls while it builds the site (``hooks`` in ``mkdocs.yml``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.docs import cli_reference, records_reference

ROOT = Path(__file__).resolve().parents[2]
GENERATED: dict[str, Callable[[], str]] = {
    "cli": cli_reference.as_markdown,
    "keys": records_reference.keys_as_markdown,
    "records": records_reference.records_as_markdown,
}
"""What takes the place of a line ``<!-- generated: NAME -->``."""

_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(\.\.?/[^)#\s]*)(?=[)#])")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """A page's text with what is generated, and with links that lead somewhere outside of the site."""
    text = _MARK.sub(lambda found: GENERATED[found[1]](), markdown)
    folder = Path(config["docs_dir"], page.file.src_uri).parent
    return _LINK.sub(lambda found: in_repository(found[1], folder, config["extra"]["repository"]), text)


def in_repository(link: str, folder: Path, repository: str) -> str:
    """A page in ``folder`` links to files of the repository by relative paths, as one reads it there. Only what is in
    ``docs/`` is on the site, so the others become links to ``repository``; what does not exist stays, and fails."""
    target = (folder / link).resolve()
    if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT) or not target.exists():
        return link
    return f"{repository}/{'tree' if target.is_dir() else 'blob'}/main/{target.relative_to(ROOT).as_posix()}"
