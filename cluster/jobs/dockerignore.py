"""``.dockerignore`` as Docker reads it: unlike git's, patterns are paths from the top of the folder, and the last one
that matches a file, or a folder above it, decides.

Source: docs.docker.com/build/concepts/context/#dockerignore-files, and github.com/moby/patternmatcher.
"""

from __future__ import annotations

import posixpath
from pathlib import Path, PurePosixPath

from gpuctl.cluster.jobs.gitignore import Pattern, parse

FILE = ".dockerignore"


class DockerIgnore:
    """Which files of a folder Docker does not see when it builds there.

    Args:
        root: the folder, absolute.
        dockerfile: path of the Dockerfile in it: that is always seen.
    """

    hint = "exclude it in .dockerignore"
    """What to do about a file that cannot be sent."""

    def __init__(self, root: Path, dockerfile: str) -> None:
        self._root = root
        self._always = {FILE, dockerfile}
        file = root / FILE
        lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines() if file.is_file() else []
        self._patterns = [pattern for line in lines if (pattern := _parsed(line))]
        self._has_exceptions = not all(pattern.leaves_out for pattern in self._patterns)

    def below(self, folder: Path) -> DockerIgnore:  # noqa: ARG002
        """The rules for what is in ``folder``: there is one file for all."""
        return self

    def verdict(self, path: Path, is_folder: bool) -> bool | None:  # noqa: ARG002
        """Whether ``path`` is left out; ``None`` if the file does not say."""
        name = PurePosixPath(path.relative_to(self._root).as_posix())
        if name.as_posix() in self._always:
            return False
        verdict = None
        names = [name.as_posix(), *(parent.as_posix() for parent in name.parents if parent.name)]
        for pattern in self._patterns:
            if any(pattern.regex.fullmatch(one) for one in names):
                verdict = pattern.leaves_out
        return verdict

    def may_hold(self, folder: Path) -> bool:
        """Whether something in ``folder``, which is left out, may be sent."""
        name = folder.relative_to(self._root).as_posix()
        return self._has_exceptions or any(one.startswith(f"{name}/") for one in self._always)


def _parsed(line: str) -> Pattern | None:
    text = line.strip()
    if line.startswith("#") or not text:
        return None
    exception = text.startswith("!")
    path = posixpath.normpath(text.removeprefix("!").strip()).strip("/")
    return None if path in (".", "") else parse(f"{'!' if exception else ''}/{path}")
