"""The version of an image that machines get. A scale set that is told ``latest`` looks it up for each machine that it
makes, so a node that comes back after a week would have other drivers than its neighbours: it is looked up once, here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.azure.client import AzureAccount, connecting
from gpuctl.stacks.clouds.azure.error_mapping import understood

LATEST = "latest"
_SUBSCRIPTION = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Image(NamedTuple):
    publisher: str
    offer: str
    sku: str
    version: str


def image(name: str) -> Image:
    """Parse ``publisher:offer:sku:version``. Raises ``BadInput`` for a name that has not four parts."""
    parts = name.split(":")
    if len(parts) != 4 or not all(parts):
        raise BadInput(f"{name!r} is not an Azure image", "for example microsoft-dsvm:ubuntu-hpc:2404:latest")
    return Image(*parts)


def newest(wanted: Image, region: str, subscription: str, account: AzureAccount | None = None) -> str:
    """The newest version of an image in a region.

    Args:
        wanted: its publisher, offer and SKU; its version is ignored.
        region: as Azure's API spells it, such as ``eastus``.
        subscription: id of the one to ask. A plan is made before anybody has logged in: what stands there for the
            subscription stands for the version then.
        account: the subscription to ask; ``None``: ``subscription``, with the credentials of the environment.

    Raises ``GpuctlError``; ``BadInput`` if the region has no such image.
    """
    if not _SUBSCRIPTION.fullmatch(subscription):
        return subscription
    account = account or connecting(subscription)
    with understood():
        found = account.compute.virtual_machine_images.list(region, *wanted[:3])
        versions = [one.name for one in found]
    if not versions:
        raise BadInput(f"Azure has no image {':'.join(wanted[:3])} in {region}", "take another --region")
    return str(max(versions, key=_age))


def _age(version: str) -> tuple[int, ...]:
    """A sort key for versions: ``24.04.10`` comes after ``24.04.9``."""
    return tuple(int(part) for part in re.findall(r"\d+", version))
