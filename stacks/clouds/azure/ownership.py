"""The owner of a thing in a subscription: its tags name it, or else its resource group's; of what takes no tags, its
words (see ``azure.of_cluster``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuctl.stacks.clouds.azure import kept_group, whose, whose_id
from gpuctl.stacks.clouds.azure.client import Answer
from gpuctl.stacks.clouds.azure.ids import group_of, type_of

STORAGE = "microsoft.storage/storageaccounts"


@dataclass(frozen=True, slots=True)
class Owner:
    """The cluster that tags name. False if there is none."""

    cluster: str = ""
    id: str = ""
    """Empty: nobody has said it."""
    owner: str = ""
    created: str = ""

    def __bool__(self) -> bool:
        return bool(self.cluster)

    def is_of(self, cluster: str, id_: str) -> bool:
        """Whether the cluster has this name and identity. Where one of both has no identity, the name has to do."""
        return self.cluster == cluster and (not id_ or not self.id or self.id == id_)


def tagged(thing: Answer) -> Owner:
    """A resource's owner by its own tags."""
    tags = thing.get("tags") or {}
    told = [str(tags.get(f"gpuctl:{key}", "")) for key in ("cluster", "id", "owner", "created")]
    return Owner(*told)


def worded(text: str) -> Owner:
    return Owner(whose(text), whose_id(text))


def region_of(thing: Answer) -> str:
    """``East US`` is ``eastus``; empty: in none."""
    return str(thing.get("location") or "").replace(" ", "").lower()


def is_kept(group: Answer) -> bool:
    """Whether a resource group is the one that ``down`` leaves, with the bucket in it: by its tag and its name."""
    return bool(tagged(group)) and group["name"].lower() == kept_group(tagged(group).cluster, region_of(group))


class Owners:
    """The owners of all resources in a subscription with these resource groups."""

    def __init__(self, groups: Sequence[Answer]) -> None:
        self._clusters = {group["name"].lower(): group for group in groups if not is_kept(group)}

    def groups(self) -> Iterator[tuple[Answer, Owner]]:
        """The resource groups of clusters."""
        for group in self._clusters.values():
            if owner := tagged(group):
                yield group, owner

    def of(self, thing: Answer) -> Owner:
        """Nobody's of ours, if it is kept. Tags that do not tell the cluster's identity give way to its group's. In
        the group that is kept, what others have put there is theirs."""
        own = tagged(thing)
        kept = kept_group(own.cluster, region_of(thing))
        if type_of(thing["id"]) == STORAGE and group_of(thing["id"]).lower() == kept:
            return Owner()
        home = self.of_scope(thing["id"])
        return own if own and (own.id or own.cluster != home.cluster) else home

    def of_scope(self, id_: str) -> Owner:
        group = self._clusters.get(group_of(id_).lower())
        return tagged(group) if group else Owner()

    def of_words(self, text: str) -> Owner:
        """The owner in these words, completed by what the cluster's group tells."""
        said = worded(text)
        if not said:
            return said
        return next((owner for _, owner in self.groups() if owner.is_of(said.cluster, said.id)), said)
