"""Checkpoints of a cluster that is down: kept, or deleted with the bucket that gpuctl made for them."""

from __future__ import annotations

import shlex
from urllib.parse import parse_qs, urlsplit

from gpuctl.cli.render.terminal import count, out, say, size
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.error_mapping import shown, to_reopen
from gpuctl.cluster.views.holders import holders_below, printable
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.providers.interface import Provider, RentsMachines
from gpuctl.stacks.providers.ownership import is_me
from gpuctl.stacks.state.clusters import KnownCluster


def delete_checkpoints_of(provider: Provider, there: KnownCluster, store: Bucket | None, is_own: bool) -> None:
    """Delete the checkpoints of a cluster, with the bucket if gpuctl made it.

    Args:
        provider: of the cluster; only one that rents can delete a bucket.
        there: the cluster, which is down.
        store: its bucket; ``None``: it is gone, or could not be opened.
        is_own: whether gpuctl made the bucket, or would have, had `up` come so far.
    """
    if isinstance(provider, RentsMachines):
        from gpuctl.cli.session.bucket_use import used_by

        for bucket in provider.kept_buckets(there):
            # One that an earlier life of this cluster made has that one's identity, and this one's name.
            if not _is_same(bucket.url, there.bucket) or not (is_own or bucket.cluster_id in ("", there.id)):
                continue
            if bucket.cluster_id not in ("", there.id) and bucket.owner and not is_me(bucket.owner):
                raise GpuctlError(
                    f"the checkpoints were not deleted: {printable(bucket.owner)} made the bucket {bucket.name}",
                    f"once nobody needs it: gpuctl buckets rm {bucket.name} --provider {provider.name}"
                    f" --region {bucket.region}",
                )
            if others := used_by(cloud(provider.name).name, bucket):
                say(f"bucket {bucket.name} is kept: it is used by {' and '.join(others)}")
                break
            provider.remove_bucket(bucket)
            out(f"deleted: bucket {bucket.name} with all that was in it")
            return
    if store is None:
        raise GpuctlError("the checkpoints could not be deleted: there is no bucket to look into", "see above")
    try:
        entries = store.list("")
    except GpuctlError as error:
        if not is_own:  # of its own the cloud has just said that there is none
            raise
        out(f"no checkpoints to delete: there is no bucket of {there.name} on {there.provider} ({error.message})")
        return
    if below := holders_below(store, entries):
        theirs = ", ".join(map(printable, sorted(below)))
        raise GpuctlError(
            f"the checkpoints were not deleted: {shown(store.url)} also holds {theirs}",
            f"delete them job by job: gpuctl ckpt rm all --job JOB --bucket {shlex.quote(to_reopen(store.url))}",
        )
    store.delete([entry.key for entry in entries])
    out(f"deleted: {count(len(entries), 'object')}, {size(sum(entry.size for entry in entries))}")


def _is_same(url: str, other: str) -> bool:
    """Whether both URLs name one bucket; Azure has containers of one name in many accounts."""
    names = [(parts.netloc, parse_qs(parts.query).get("account_name")) for parts in map(urlsplit, (url, other))]
    return names[0] == names[1]


def tell_what_remains(store: Bucket) -> None:
    """Print what is left in the bucket, and how it is looked at."""
    try:
        entries = store.list("")
    except GpuctlError as error:
        say(f"could not check what is left in the bucket: {error.message}")
        return
    kept = sum(entry.size for entry in entries)
    if entries:
        out(f"what remains: {shown(store.url)} ({count(len(entries), 'object')}, {size(kept)})")
        say(f"see: gpuctl ckpt ls --bucket {shlex.quote(to_reopen(store.url))}")
