"""Resources of our clusters, found by asking Google kind by kind, whatever Pulumi's state knows of them.

Machines, disks, addresses, forwarding rules and templates have our labels. What takes none is known by the name or the
words that ``network``, ``group`` and ``identity`` give it, or by standing in a cluster's network: those keep it from
being deleted, whoever made them. The bucket is not among them: it is kept on purpose (see ``kept_buckets``);
who may use it is.

Compute Engine tells of all zones and regions in one answer, so a scan of everything costs no more than of one region.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.clouds.gcp.cleanup.leak_kinds import KINDS, Kind
from gpuctl.stacks.clouds.gcp.client import GcpAccount, entering, last
from gpuctl.stacks.clouds.gcp.ownership import (
    LABEL,
    ROLE,
    ROLE_ID,
    SERVICE_ACCOUNT,
    TAG_KEY,
    OwnershipLabels,
    by_labels,
    by_words,
)
from gpuctl.stacks.clouds.gcp.usual_region import usual_region

_ALL = "all"
_AT_ONCE = 8
_OF_NODES = re.compile(r"(?:deleted:)?serviceAccount:([^@]+)@.*")
"""Its account, in a member of a policy."""
_ACCOUNT_CHARACTERS = 30


def scan(regions: Sequence[str], cluster: str | None = None, account: GcpAccount | None = None) -> Scan:
    """See ``Cloud``. Where no region is named, by the environment neither, it looks everywhere. What is
    in no region is always looked at; what Google refuses to show is told in ``unseen``."""
    account = (account or entering()).log_in()
    searched = places(regions, account)
    looks: list[tuple[str, Callable[[], Iterator[Leftover]]]] = [
        (f"{kind.what}s", partial(_found, kind, account, cluster)) for kind in KINDS
    ]
    looks += [
        ("service accounts", partial(_service_accounts, account)),
        ("roles", partial(_roles, account)),
        ("role bindings", partial(_bindings, account)),
        ("bucket bindings", partial(_bucket_bindings, account, cluster)),
        ("tags", partial(_tags, account)),
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = list(pool.map(_seen, looks))
    found = [one for part, _ in seen for one in part if cluster in (None, one.cluster)]
    return Scan(
        regions=searched,
        found=tuple(sorted((one for one in found if one.region in ("", *searched)), key=_order)),
        unseen=tuple(why for _, why in seen if why),
    )


def _seen(look: tuple[str, Callable[[], Iterator[Leftover]]]) -> tuple[list[Leftover], str]:
    """The resources that a look has found, and why there may be more."""
    what, find = look
    found: list[Leftover] = []
    try:
        found.extend(find())
    except GpuctlError as error:
        return found, f"{what}: {error.message}"
    return found, ""


def _order(one: Leftover) -> tuple[str, float, str, str, str]:
    usd = math.inf if one.usd_per_hour is None else one.usd_per_hour
    return one.cluster, -usd, one.kind, one.region, one.id


def places(regions: Sequence[str], account: GcpAccount) -> tuple[str, ...]:
    """The regions to look into: ``all``, those that are named, else the usual one. Raises ``BadInput`` for an unknown
    one: nothing would be found there, which proves nothing."""
    known = tuple(sorted(region.name for region in account.listed("Regions")))
    usual, _ = usual_region()
    wanted = tuple(dict.fromkeys(regions)) or ((usual,) if usual else (_ALL,))
    if _ALL in wanted:
        return known
    if unknown := [region for region in wanted if region not in known]:
        raise BadInput(f"unknown region {unknown[0]!r} of Google Cloud", f"use all, or some of: {', '.join(known)}")
    return wanted


# -- Compute Engine ---------------------------------------------------------------------------------------------------


def _found(kind: Kind, account: GcpAccount, cluster: str | None) -> Iterator[Leftover]:
    asked = {"filter": f"labels.{LABEL}={cluster}" if cluster else f"labels.{LABEL}:*"} if kind.labelled else {}
    things = (
        account.everywhere(kind.client, kind.field, **asked)
        if kind.field
        else (("global", thing) for thing in account.listed(kind.client, **asked))
    )
    for scope, thing in things:
        mark = kind.mark(thing)
        if mark is None:
            continue
        region, zone = _region(scope), last(scope) if scope.startswith("zones/") else ""
        yield _leftover(
            mark,
            kind.what,
            thing.name,
            f"projects/{account.project}/{scope}/{kind.collection}/{thing.name}",
            region=region,
            about=", ".join(word for word in (*kind.about(thing), zone) if word),
            usd_per_hour=kind.usd(thing, region),
        )


def _leftover(mark: OwnershipLabels, kind: str, id_: str, ref: str, **more: Any) -> Leftover:
    told = {"cluster": mark.cluster, "cluster_id": mark.id, "owner": mark.owner, "created": mark.created}
    return Leftover(**{"kind": kind, "id": id_, "ref": ref, "region": "", **told, **more})


def _region(scope: str) -> str:
    """The region of ``zones/us-central1-a`` or ``regions/us-central1``; empty for ``global``."""
    kind, _, name = scope.partition("/")
    return name.rpartition("-")[0] if kind == "zones" else name


# -- what is in no place ----------------------------------------------------------------------------------------------


def _service_accounts(account: GcpAccount) -> Iterator[Leftover]:
    for email, mark in _marked_accounts(account):
        yield _leftover(mark, "service account", email, f"projects/{account.project}/serviceAccounts/{email}")


def _marked_accounts(account: GcpAccount) -> Iterator[tuple[str, OwnershipLabels]]:
    """The e-mail addresses of our service accounts, and whose each is."""
    for page in account.pages("iam", f"v1/projects/{account.project}/serviceAccounts", pageSize=100):
        for one in page.get("accounts", ()):
            if mark := by_words(one.get("displayName", ""), SERVICE_ACCOUNT):
                yield one["email"], mark


def _roles(account: GcpAccount) -> Iterator[Leftover]:
    for page in account.pages("iam", f"v1/projects/{account.project}/roles", pageSize=300):
        for role in page.get("roles", ()):
            mark = by_words(role.get("title", ""), ROLE)
            if mark and not role.get("deleted"):
                yield _leftover(mark, "role", role["name"], role["name"])


def _bindings(account: GcpAccount) -> Iterator[Leftover]:
    """The bindings of our roles to members; one may have outlived the role, and the account too."""
    asked = {"options": {"requestedPolicyVersion": 3}}  # else those with a condition are left out
    policy = account.ask("cloudresourcemanager", f"v1/projects/{account.project}:getIamPolicy", asked)
    for binding in policy.get("bindings", ()):
        if owner := ROLE_ID.fullmatch(binding["role"]):
            cluster = owner[1].replace("_", "-")
            told = by_words(binding.get("condition", {}).get("description", ""))
            mark = told if told and told.cluster == cluster else OwnershipLabels(cluster)
            yield from _members(binding, mark, "role binding", f"projects/{account.project}")


def _bucket_bindings(account: GcpAccount, cluster: str | None) -> Iterator[Leftover]:
    """Nodes that may use their own cluster's bucket, which outlives them; another cluster that was given it has rights
    of its own there. A binding is the account's as long as that is there: the bucket may be older than the cluster."""
    accounts: dict[str, OwnershipLabels] | None = None
    for page in account.pages("storage", "storage/v1/b", project=account.project):
        for bucket in page.get("items", ()):
            mark = by_labels(bucket.get("labels", {}))
            if mark is None or cluster not in (None, mark.cluster):
                continue
            query = {"optionsRequestedPolicyVersion": 3}
            policy = account.ask("storage", f"storage/v1/b/{bucket['name']}/iam", query=query)
            for binding in policy.get("bindings", ()):
                own, ref = _account_of(bucket["name"], mark.cluster), f"b/{bucket['name']}"
                members = [(_OF_NODES.fullmatch(one), one) for one in binding.get("members", ())]
                for member in (one for found, one in members if found and found[1] == own):
                    if accounts is None:
                        accounts = dict(_marked_accounts(account))
                    owner = accounts.get(member.removeprefix("serviceAccount:"), mark)
                    yield from _members({**binding, "members": [member]}, owner, "bucket binding", ref)


def _account_of(bucket: str, cluster: str) -> str:
    """The service account of a cluster's nodes, as ``StackRequest.named`` calls it; the bucket's name ends in the same
    mark."""
    whole = f"gpuctl-{cluster}"
    if len(whole) <= _ACCOUNT_CHARACTERS:
        return whole
    return f"{whole[: _ACCOUNT_CHARACTERS - 7].rstrip('-')}-{bucket.rpartition('-')[2][:6]}"


def _members(binding: dict[str, Any], mark: OwnershipLabels, kind: str, of: str) -> Iterator[Leftover]:
    """``ref``: whose policy it is, the role, and the member."""
    role = binding["role"]
    for member in binding.get("members", ()):
        about = "" if kind == "role binding" else last(of)
        yield _leftover(mark, kind, f"{last(role)} of {member}", f"{of} {role} {member}", about=about)


def _tags(account: GcpAccount) -> Iterator[Leftover]:
    for page in account.pages("cloudresourcemanager", "v3/tagKeys", parent=f"projects/{account.project}", pageSize=300):
        for key in page.get("tagKeys", ()):
            if mark := by_words(key.get("description", ""), TAG_KEY):
                yield _tag("tag key", key, mark)
                yield from _tag_values(account, key["name"], mark)


def _tag_values(account: GcpAccount, key: str, mark: OwnershipLabels) -> Iterator[Leftover]:
    for page in account.pages("cloudresourcemanager", "v3/tagValues", parent=key, pageSize=300):
        for value in page.get("tagValues", ()):
            yield _tag("tag value", value, mark)


def _tag(kind: str, tag: dict[str, Any], mark: OwnershipLabels) -> Leftover:
    return _leftover(mark, kind, tag["name"], tag["name"], about=tag.get("namespacedName", ""))
