"""The buckets that ``down`` leaves: found by name and tag, and deleted with everything that is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.aws.client import Connect, connecting, understood
from gpuctl.stacks.clouds.aws.partition import home
from gpuctl.stacks.clouds.aws.usual_region import usual_region

OURS = "gpuctl-"
"""Names begin so (see ``StackRequest.place``)."""
_TAG = "gpuctl:cluster"
_ALL = "all"
_AT_ONCE = 1000
"""Most objects that one request may delete: docs.aws.amazon.com/AmazonS3, DeleteObjects."""
_PASSES = 5
"""While somebody still writes there."""


def buckets(regions: Sequence[str], cluster: str | None, connect: Connect | None = None) -> list[KeptBucket]:
    """See ``Cloud``. No regions: wherever they are, for S3 lists all of them in one answer."""
    connect = connect or connecting()
    named = [region for region in regions if region != _ALL]
    at = home(named[0] if named else usual_region()[0])
    found = []
    with understood():
        s3 = connect("s3", at)
        for listed in list(_listed(s3)):
            region = _region(s3, listed)
            if named and _ALL not in regions and region not in named:
                continue
            tags = _tags(connect("s3", region), listed["Name"])
            if tags.get(_TAG) and cluster in (None, tags[_TAG]):
                found.append(_kept(listed["Name"], region, tags))
    return sorted(found, key=lambda one: (one.cluster, one.name))


def remove(bucket: KeptBucket, connect: Connect | None = None) -> None:
    """See ``Cloud``. Gone already is no failure. Raises ``BadInput`` if its tags do not say that gpuctl made it
    for this cluster, ``GpuctlError`` if S3 keeps anything."""
    s3 = (connect or connecting())("s3", bucket.region)
    with understood():
        try:
            _refuse_a_strangers(bucket, _tags(s3, bucket.name))
            for _ in range(_PASSES):
                _empty(s3, bucket.name)
                try:
                    s3.delete_bucket(Bucket=bucket.name)
                    return
                except s3.exceptions.ClientError as error:
                    if _code(error) != "BucketNotEmpty":
                        raise
        except s3.exceptions.ClientError as error:
            if _code(error) == "NoSuchBucket":
                return
            raise
    raise GpuctlError(f"{bucket.name} is still being written to", "remove the cluster that uses it first")


def _listed(s3: Any) -> Iterator[dict[str, Any]]:
    for page in s3.get_paginator("list_buckets").paginate(Prefix=OURS):
        yield from (one for one in page["Buckets"] if one["Name"].startswith(OURS))


def _region(s3: Any, listed: dict[str, Any]) -> str:
    """``None`` and ``EU`` are what the two oldest regions are called: API of ``GetBucketLocation``."""
    if told := listed.get("BucketRegion"):
        return str(told)
    place = s3.get_bucket_location(Bucket=listed["Name"]).get("LocationConstraint")
    return {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}.get(place) or str(place)


def _tags(s3: Any, name: str) -> dict[str, str]:
    """None of a bucket that has none; nor of one that was deleted since it was listed, which ``remove`` finds out."""
    try:
        answer = s3.get_bucket_tagging(Bucket=name)
    except s3.exceptions.ClientError as error:
        if _code(error) in ("NoSuchTagSet", "NoSuchTagSetError"):
            return {}
        raise
    return {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}


def _kept(name: str, region: str, tags: dict[str, str]) -> KeptBucket:
    cluster = tags[_TAG]
    return KeptBucket(
        cluster=cluster,
        url=f"s3://{name}/{cluster}?region={region}",
        name=name,
        region=region,
        cluster_id=tags.get("gpuctl:id", ""),
        owner=tags.get("gpuctl:owner", ""),
        created=tags.get("gpuctl:created", ""),
    )


def _refuse_a_strangers(bucket: KeptBucket, tags: dict[str, str]) -> None:
    if not bucket.name.startswith(OURS) or not tags.get(_TAG):
        raise BadInput(f"gpuctl did not create the bucket {bucket.name}", "delete it by hand if it should go")
    if tags[_TAG] != bucket.cluster or (bucket.cluster_id and tags.get("gpuctl:id") != bucket.cluster_id):
        raise BadInput(f"the bucket {bucket.name} belongs to another cluster now", "list the kept buckets again")


def _empty(s3: Any, name: str) -> None:
    """Objects with all their versions, if the user has turned those on, and uploads that were never finished."""
    for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=name):
        for upload in page.get("Uploads", ()):
            s3.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
    versions = _versions(s3, name)
    while batch := list(islice(versions, _AT_ONCE)):
        answer = s3.delete_objects(Bucket=name, Delete={"Objects": batch, "Quiet": True})
        for refused in answer.get("Errors", ()):
            raise GpuctlError(
                f"S3 keeps {refused.get('Key')} in {name}: {refused.get('Code')}: {refused.get('Message')}",
                "is it locked, or does a policy of the bucket forbid it?",
            )


def _versions(s3: Any, name: str) -> Iterator[dict[str, str]]:
    """All versions of a bucket's objects; without versioning, the objects with version ``null``."""
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=name):
        for one in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
            yield {"Key": one["Key"], "VersionId": one["VersionId"]}


def _code(error: Any) -> str:
    return str(error.response["Error"].get("Code", ""))
