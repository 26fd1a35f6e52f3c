"""An account of a cloud of which nothing is known but what it holds, by its tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.clouds.interface import Cloud


class TaggedAccount(Cloud):
    def __init__(self, name: CloudName, *there: Leftover) -> None:
        self.name = name
        self.there = list(there)
        self.unseen: tuple[str, ...] = ()

    def program(self, *_: object) -> Mapping[str, object]:
        raise NotImplementedError

    def extras(self, *_: object) -> Any:
        raise NotImplementedError

    def leftovers(self, regions: Sequence[str], cluster: str | None) -> Scan:
        found = tuple(one for one in self.there if one.region in ("", *regions) and cluster in (None, one.cluster))
        return Scan(regions=tuple(regions), found=found, unseen=self.unseen)

    def remove(self, leftovers: Sequence[Leftover], say: Callable[[str], None]) -> None:
        for one in leftovers:
            say(f"deleted {one.kind} {one.id}")
            self.there.remove(one)
