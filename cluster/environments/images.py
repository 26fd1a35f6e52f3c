"""The container images that are in the bucket: named, looked up, listed, removed.

A job says ``bucket:NAME``. What that is when it is submitted goes into its spec, so that all its nodes run the same
image in all its rounds, whatever is built meanwhile. Layers are objects of their own, each once, however many images
have it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from gpuctl.cluster import layout
from gpuctl.cluster.environments.registry import short
from gpuctl.cluster.errors import BadInput, CorruptRecord, GpuctlError
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.images import ImageName, StoredImage
from gpuctl.cluster.storage.interface import Store

IN_BUCKET = "bucket:"
"""What the name of such an image begins with."""
AT = "@sha256:"
ALL = "all"
_DAY_S = 86_400.0
_NAME = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*")
REPOSITORY = "localhost/gpuctl"
"""What Docker and Podman of a node have such images under."""


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image in the bucket, and what it is called there."""

    image: StoredImage
    name: str
    """Empty: the name means a later one by now."""

    @property
    def stored_bytes(self) -> int:
        return sum(layer.stored_bytes for layer in dict.fromkeys(self.image.layers))


def checked_name(name: str) -> str:
    """``name`` if images can have it (as Docker allows). Raises ``BadInput``."""
    if name == ALL:
        raise BadInput(f"an image cannot be called {ALL}", "`gpuctl image rm all` means every image; use another name")
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise BadInput(f"{name!r} cannot be the name of an image", "use a-z, 0-9 and single -, _ or . between them")
    return name


def is_in_bucket(image: str) -> bool:
    """Whether a job's image is one of these, and no registry's."""
    return image.startswith(IN_BUCKET)


def pinned(store: Store, image: str) -> str:
    """A job's image as its spec has it: ``bucket:NAME`` becomes ``bucket:NAME@sha256:DIGEST``; all others stay.

    Raises ``BadInput`` for one that the bucket does not have.
    """
    if not is_in_bucket(image):
        return image
    name, at, digest = image.removeprefix(IN_BUCKET).partition(AT)
    checked_name(name)
    digest = digest if at else named(store, name)
    if not digest or built(store, digest) is None:
        there = ", ".join(IN_BUCKET + one.name for one in listed(store) if one.name) or "none"
        raise BadInput(f"there is no image {image} in the bucket", f"there are: {there}; see `gpuctl image build`")
    return f"{IN_BUCKET}{name}{AT}{digest}"


def digest_of(pinned_image: str) -> str:
    """Of an image as a job's spec has it; empty for one of a registry's."""
    return pinned_image.partition(AT)[2] if is_in_bucket(pinned_image) else ""


def local_name(pinned_image: str) -> str:
    """What Docker and Podman of a node call it.

    >>> local_name("bucket:mine@sha256:0123456789abcdef")
    'localhost/gpuctl/mine:0123456789ab'
    """
    name, _, digest = pinned_image.removeprefix(IN_BUCKET).partition(AT)
    return f"{REPOSITORY}/{name}:{short(digest)}"


def shown(image: str) -> str:
    """A job's image as people see it.

    >>> shown("bucket:mine@sha256:0123456789abcdef"), shown("debian@sha256:0123456789abcdef")
    ('bucket:mine', 'debian@sha256:0123456789abcdef')
    """
    return image.partition(AT)[0] if is_in_bucket(image) else image


def named(store: Store, name: str) -> str:
    """The digest that a name means; empty if it means nothing."""
    data = store.get(layout.image_name(name))
    return decode(data, ImageName, layout.image_name(name)).digest if data else ""


def built(store: Store, digest: str) -> StoredImage | None:
    """The image of that digest, if the bucket has it."""
    data = store.get(layout.image(digest))
    return decode(data, StoredImage, layout.image(digest)) if data else None


def publish(store: Store, image: StoredImage) -> None:
    """Make known an image whose layers are in the bucket, under its name.

    Raises ``GpuctlError`` if somebody has removed one of them meanwhile; then it is not known.
    """
    # In this order: an image that no name means is one that a later build under that name may remove.
    store.put(layout.image_name(image.name), encode(ImageName(digest=image.digest)))
    store.put(layout.image(image.digest), encode(image))
    there = {entry.key for entry in store.list(f"{layout.IMAGES}/layers")}
    if any(layout.image_layer(layer.sha256) not in there for layer in image.layers):
        store.delete([layout.image_name(image.name), layout.image(image.digest)])
        raise GpuctlError("a layer of this image was removed from the bucket meanwhile", "build it again")


def listed(store: Store) -> list[NamedImage]:
    """All images in the bucket by name, those whose name means another by now last."""
    digests = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in store.list(f"{layout.IMAGES}/built")]
    names = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in store.list(f"{layout.IMAGES}/named")]
    means: dict[str, list[str]] = {}
    for name in names:
        with contextlib.suppress(CorruptRecord):  # the next build under that name writes it anew
            means.setdefault(named(store, name), []).append(name)
    found = []
    for digest in digests:
        try:
            image = built(store, digest)
        except CorruptRecord:  # another version of gpuctl wrote it
            continue
        if image is not None:
            found += [NamedImage(image, name) for name in means.get(digest, [""])]
    return sorted(found, key=lambda one: (not one.name, one.name, -one.image.built_at))


def find(there: list[NamedImage], name: str) -> NamedImage:
    """The image that is called ``name``, or whose digest begins so. Raises ``BadInput`` if that is none, or several."""
    wanted = name.removeprefix(IN_BUCKET)
    found = [one for one in there if one.name == wanted] or [
        one for one in there if wanted and one.image.digest.startswith(wanted)
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name or short(one.image.digest) for one in there[:5]) or "none"
    what = "is not an image in the bucket" if not found else "is the beginning of several"
    raise BadInput(f"{name} {what}", f"there are: {names} (gpuctl image ls)")


def remove(store: Store, gone: Iterable[NamedImage]) -> int:
    """Remove images by their names, and the layers that no other has; returns how many bytes that were.

    Layers that a build has sent which never ended go too, a day later: until then it may be about to name them.
    """
    gone = list(gone)
    store.delete([layout.image_name(one.name) for one in gone if one.name])
    still = {one.image.digest for one in listed(store) if one.name}
    store.delete([layout.image(one.image.digest) for one in gone if one.image.digest not in still])
    theirs = {layout.image_layer(layer.sha256) for one in gone for layer in one.image.layers}
    layers = store.list(f"{layout.IMAGES}/layers")
    kept = {layout.image_layer(layer.sha256) for one in listed(store) for layer in one.image.layers}
    old = time.time() - _DAY_S
    unused = [one for one in layers if one.key not in kept and (one.key in theirs or one.modified < old)]
    store.delete([one.key for one in unused])
    return sum(one.size for one in unused)
