"""The regions of a subscription, and what to say of a name that is none of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.azure.client import AzureAccount

_VERSION = "2022-12-01"
_ALL = "all"


def regions_of(account: AzureAccount) -> tuple[str, ...]:
    """The regions where something can be made: the list also has names for several regions at once, such as ``europe``.
    Raises ``GpuctlError``."""
    found = account.listed("locations", _VERSION)
    return tuple(one["name"] for one in found if (one.get("metadata") or {}).get("regionType") != "Logical")


def unknown_region(region: str, known: Iterable[str]) -> BadInput | None:
    """``None`` if it is known. Azure's own pages write ``East US`` for ``eastus``."""
    names = list(known)
    if region in names:
        return None
    plain = region.replace(" ", "").replace("-", "").lower()
    near: Sequence[str] = [plain] if plain in names else difflib.get_close_matches(plain, names, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see az account list-locations -o table"
    return BadInput(f"unknown region {region!r} on Azure", hint)


def places_of(account: AzureAccount, regions: Sequence[str]) -> tuple[str, ...]:
    """The regions to look into; none: all of them. Raises ``BadInput`` for a name that is none: nothing is ever left in
    a region that is spelled wrong."""
    if not regions or _ALL in regions:
        return ()
    known = regions_of(account)
    for region in regions:
        if error := unknown_region(region, known):
            raise error
    return tuple(dict.fromkeys(regions))
