"""The provider of each cloud: whichever way this machine knows a cluster, it is rented, repaired and taken away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.clusters import ClusterSpec, PastCluster
from gpuctl.cluster.views.holders import printable
from gpuctl.stacks.catalog import region_names
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.extras import not_installed
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.providers.interface import Dialog, RentRequest, RentsMachines
from gpuctl.stacks.rented.missing_engine import MissingEngine
from gpuctl.stacks.request import last_request
from gpuctl.stacks.request.last_request import LastRequest
from gpuctl.stacks.state.clusters import KnownCluster

if TYPE_CHECKING:
    from gpuctl.stacks.rented.clusters import RentedClusters


class CloudProvider(RentsMachines):
    """Nodes rented from one cloud. Pulumi and the cloud's packages are imported by what needs them."""

    def __init__(self, name: str, dialog: Dialog) -> None:
        super().__init__(name, dialog)
        self._cloud = cloud(name)
        self._has_told = False
        """That the last request cannot be read."""

    def rent(self, rental: RentRequest) -> KnownCluster:
        """Rent a cluster; see ``RentedClusters.up``."""
        with self._rented(rental.backend) as rented:
            return rented.up(
                rental.request,
                rental.terms,
                wait_s=rental.wait_s,
                force=rental.force,
                confirm=self._dialog.confirm,
            )

    def repair(self, cluster: str, *, wait_s: float, force: bool = False) -> KnownCluster:
        last = last_request.of(cluster)
        with self._rented(last.backend) as rented:
            return rented.repair(last, wait_s=wait_s, force=force, confirm=self._dialog.confirm)

    def down(self, cluster: KnownCluster, *, force: bool = False) -> list[str]:
        """Take a cluster away by Pulumi's state and then by tag; by tag alone where this machine has no state of it,
        because it was attached, or lost its record."""
        last = self._last_of(cluster)
        if last is None:
            from gpuctl.stacks.rented.by_tag import remove_known

            return remove_known(cluster, self._dialog, force=force)
        with self._rented(last.backend, may_lack_pulumi=True) as rented:
            return rented.down(last.request, force=force)

    def retry_hint(self, cluster: KnownCluster) -> str:
        where = f" --region {cluster.region}" if cluster.region else ""
        return (
            f"{super().retry_hint(cluster)}, or remove whatever has its name: gpuctl down --by-tag {cluster.name}"
            f" --provider {self.name}{where}"
        )

    def has_own_bucket(self, cluster: KnownCluster) -> bool:
        last = self._last_of(cluster)
        return last is not None and last.request.is_own(cluster.bucket)

    def attach(self, record: ClusterSpec | PastCluster) -> None:
        """Notes the region, so that ``leaks`` looks there."""
        if record.region:
            name = region_names.check(self._cloud.name, printable(record.region), new=True)
            regions.note_used(self._cloud.name, name)

    def kept_buckets(self, cluster: KnownCluster) -> list[KeptBucket]:
        return list(self._cloud.kept_buckets([cluster.region or "all"], cluster.name))

    def remove_bucket(self, bucket: KeptBucket) -> None:
        self._cloud.remove_bucket(bucket)

    @contextmanager
    def _rented(self, backend: str, *, may_lack_pulumi: bool = False) -> Iterator[RentedClusters]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # Pulumi's SDK brings gRPC, which tells of every goodbye
        from gpuctl.stacks.rented.clusters import RentedClusters

        say = self._dialog.say
        try:
            from gpuctl.stacks.engine.automation import Engine
        except ModuleNotFoundError as error:
            missing = not_installed(error)
            if missing is None or not may_lack_pulumi:
                raise
            yield RentedClusters(lambda cluster: MissingEngine(cluster, missing), say, backend=backend)
            return
        with self._dialog.progress() as on_progress:
            engine = partial(Engine, backend=backend, on_progress=on_progress, say=say)
            yield RentedClusters(engine, say, backend=backend)

    def _last_of(self, cluster: KnownCluster) -> LastRequest | None:
        """``None`` too where it is of another cluster of that name."""
        try:
            last = last_request.find(cluster.name)
        except CorruptRecord as error:
            if not self._has_told:
                self._dialog.say(f"{error.message}: going on by the cluster's tags")
            self._has_told = True
            return None
        is_its = last is not None and (last.request.provider, last.request.id) == (cluster.provider, cluster.id)
        return last if is_its else None
