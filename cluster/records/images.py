"""What is written of the container images that the bucket keeps."""

from __future__ import annotations

import msgspec


class ImageLayer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer of an image: a tar of what it adds."""

    sha256: str
    """Of the layer as the container runtime has saved it, which names the object."""
    bytes: int
    stored_bytes: int
    """Of the object, which is compressed."""


class StoredImage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``images/built/<digest>.json``: an image that is in the bucket. Written after its layers."""

    digest: str
    """SHA-256 of ``config``, by which Docker and Podman know an image too."""
    name: str
    """That it was built under."""
    config: str
    """The image's own description (OCI image configuration), as the runtime wrote it."""
    layers: tuple[ImageLayer, ...]
    """Bottom first."""
    node: str = ""
    """Who built it."""
    built_at: float = 0.0


class ImageName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``images/named/<name>.json``: what a name means now. Each build under that name changes it."""

    digest: str
