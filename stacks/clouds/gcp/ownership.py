"""The owner of a thing, told by its labels, or, where Google takes none, in the words that describe it.

``network``, ``group`` and ``identity`` write those words, ``leaks`` reads them. A display name and a role's title have
100 characters, so they hold the identity alone; all other descriptions hold the owner and the day too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from gpuctl.stacks.clouds.gcp import labels
from gpuctl.stacks.request.stack_request import StackRequest

LABEL = "gpuctl-cluster"
NAMED = re.compile(r"gpuctl-([a-z][a-z0-9-]*)")
"""Networks, groups and their placement: names that begin so are ours."""
_DETAILS = r"(?: \((id [^)]*)\))?"
_WORDS = re.compile(rf".*\bgpuctl cluster (\S+){_DETAILS}")
SERVICE_ACCOUNT = re.compile(rf"nodes of the gpuctl cluster (\S+){_DETAILS}")
"""What is shown of it: a long cluster's name is cut off in its own."""
ROLE = re.compile(rf"leave the group of the gpuctl cluster (\S+){_DETAILS}")
ROLE_ID = re.compile(r"projects/[^/]+/roles/gpuctl_([a-z0-9_]+?)(?:_\d{4}_\d\d_\d\d)?")
"""Its day is not the cluster's name."""
TAG_KEY = re.compile(rf"marks what belongs to the gpuctl cluster (\S+){_DETAILS}")


class OwnershipLabels(NamedTuple):
    """The owner of a resource by its labels; all but the cluster may be empty."""

    cluster: str
    id: str = ""
    owner: str = ""
    created: str = ""


def described(request: StackRequest, what: str) -> str:
    """``network of the`` gives ``network of the gpuctl cluster demo (id 0a1b2c3d4e, owner me, created 2026-11-21)``."""
    own = labels(request)
    keys = {"id": "gpuctl-id", "owner": "gpuctl-owner", "created": "gpuctl-created"}
    details = ", ".join(f"{name} {own[key]}" for name, key in keys.items() if key in own)
    return f"{what} gpuctl cluster {request.cluster} ({details})" if request.id else named(request, what)


def named(request: StackRequest, what: str) -> str:
    """The same in short: the cluster's name, and its identity if it has one."""
    return f"{what} gpuctl cluster {request.cluster}" + (f" (id {request.id})" if request.id else "")


def by_labels(of: Mapping[str, str]) -> OwnershipLabels | None:
    cluster = of.get(LABEL, "")
    return (
        OwnershipLabels(cluster, *(of.get(f"gpuctl-{key}", "") for key in ("id", "owner", "created")))
        if cluster
        else None
    )


def by_words(said: str, words: re.Pattern[str] = _WORDS) -> OwnershipLabels | None:
    found = words.fullmatch(said)
    if found is None:
        return None
    details = dict(part.split(" ", 1) for part in (found[2] or "").split(", ") if " " in part)
    return OwnershipLabels(found[1], details.get("id", ""), details.get("owner", ""), details.get("created", ""))


def by_name(name: str, said: str = "") -> OwnershipLabels | None:
    """``said``: its description, which may tell more of the same cluster."""
    found = NAMED.fullmatch(name)
    if found is None:
        return None
    told = by_words(said)
    return told if told and told.cluster == found[1] else OwnershipLabels(found[1])
