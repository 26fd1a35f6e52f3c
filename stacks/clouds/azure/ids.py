"""Azure's resource ids, such as ``/subscriptions/…/resourceGroups/GROUP/providers/Microsoft.Compute/disks/NAME``, in
their parts. Azure writes some groups in capitals, and takes either."""

from __future__ import annotations


def group_of(id_: str) -> str:
    """Name of the resource group; empty: it is in none."""
    parts = id_.strip("/").split("/")
    return parts[3] if len(parts) > 3 and parts[2].lower() == "resourcegroups" else ""


def type_of(id_: str) -> str:
    """Such as ``microsoft.compute/disks``, in small letters: not every list tells it in the same way. Of what hangs on
    another thing, such as a role assignment, its own."""
    _, _, tail = id_.rpartition("/providers/")
    provider, *pairs = tail.lower().split("/")
    return "/".join([provider, *pairs[::2]])


def name_of(id_: str) -> str:
    return id_.rstrip("/").rpartition("/")[2]


def short(id_: str) -> str:
    """``GROUP/NAME``, as ``az`` asks for them; what is part of another has that one's name before its own."""
    parts = id_.strip("/").split("/")
    if len(parts) <= 4:
        return parts[-1]
    _, _, tail = id_.rpartition("/providers/")
    return "/".join([group_of(id_).lower(), *tail.split("/")[2::2]])


def is_below(id_: str, above: str) -> bool:
    """Whether ``id_`` is part of ``above``, which takes it along when it is deleted."""
    return id_.lower().startswith(f"{above.lower().rstrip('/')}/")


def is_group(id_: str) -> bool:
    """Whether an id is a resource group's own."""
    return len(id_.strip("/").split("/")) == 4 and bool(group_of(id_))
