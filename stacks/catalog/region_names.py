"""Names of regions: the catalog has all that there are, by cloud, and those that ``gpuctl offers --refresh`` has found
since. A cloud opens some each year, so a name that only looks like one is for the cloud to judge.
"""

from __future__ import annotations

import difflib
import re

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CloudName, catalog

_LOOKS_LIKE_ONE = {
    "aws": re.compile(r"[a-z]{2}(-[a-z]+){1,3}-\d"),
    "gcp": re.compile(r"[a-z]+-[a-z]+\d+"),
    "azure": re.compile(r"[a-z]+\d?"),
}


def normal(name: str) -> str:
    """A region's name as the cloud's API spells it.

    >>> normal("East US"), normal(" us-east-1 ")
    ('eastus', 'us-east-1')
    """
    return re.sub(r"\s", "", name).lower()


def known(provider: CloudName) -> list[str]:
    types = {machine.name for machine in catalog().types if machine.provider == provider}
    priced = {price.region for price in catalog().prices if price.type in types}
    return sorted({*catalog().regions.get(provider, ()), *priced} - {""})


def is_known(provider: CloudName, name: str) -> bool:
    return name in known(provider)


def check(provider: CloudName, name: str, *, new: bool = False) -> str:
    """``normal``, if there is such a region. ``new``: one that is not known will do if it looks like one, for the cloud
    is asked next. Raises ``BadInput`` with the names that are most like it."""
    spelled = normal(name)
    if is_known(provider, spelled):
        return spelled
    looks_like_one = bool(_LOOKS_LIKE_ONE[provider].fullmatch(spelled))
    if new and looks_like_one:
        return spelled
    near = difflib.get_close_matches(spelled, known(provider), 3, 0.7)
    near.sort(key=lambda one: sorted(one) != sorted(spelled))  # letters that have changed places are the usual error
    hint = f"did you mean {' or '.join(near)}?" if near else f"for example {', '.join(known(provider)[:3])}"
    if looks_like_one:
        hint += f" (if it is new: gpuctl offers --refresh --provider {provider} --region {spelled})"
    raise BadInput(f"unknown region {name!r}", hint)
