"""Commands in a message about a cluster that was named have its name too: followed as they stand, they would be about
the one that is called ``default``, and some of them take it down.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gpuctl.cluster.errors import GpuctlError

_COMMAND = re.compile(r"\bgpuctl (?P<verb>[a-z]+)(?P<below> [a-z]+(?![\w-]))?(?P<rest>[^`;,()]*)")
_NAMED = re.compile(r"(?:^|\s)(?:-c|--cluster|--by-tag)\b")


def name_cluster(error: GpuctlError, cluster: str, verb_of: Callable[[str, str], str]) -> None:
    """Add the cluster's name to the commands in an error's message and hint.

    Args:
        error: of a verb that was about ``cluster``; it is changed.
        cluster: its name.
        verb_of: of the first word of a command, and the next or an empty one, those that are the verb, as in ``ckpt
            ls``; empty for one that cannot be told a cluster.
    """

    def with_name(found: re.Match[str]) -> str:
        below = found["below"] or ""
        verb = verb_of(found["verb"], below.strip())
        if not verb or _NAMED.search(found["rest"]):
            return found[0]
        return f"gpuctl {verb} --cluster {cluster}{found[0].removeprefix(f'gpuctl {verb}')}"

    error.message = _COMMAND.sub(with_name, error.message)
    error.hint = _COMMAND.sub(with_name, error.hint)
