"""Releases of Pulumi: fetched in a way that can be continued, and checked against the checksums published beside them.

The layout is that of get.pulumi.com; ``$GPUCTL_PULUMI_RELEASES`` names a mirror of it for sites that reach no other::

    <releases>/sdk/pulumi-v3.272.0-linux-x64.tar.gz
    <releases>/sdk/pulumi-3.272.0-checksums.txt                         SHA-256 (pulumi/pulumi, sign.yml: `sha256sum`)
    <releases>/plugins/pulumi-resource-aws-v7.51.1-linux-amd64.tar.gz
    <releases>/plugins/pulumi-aws_7.51.1_checksums.txt                  SHA-1 (pulumi/pulumi-aws, publish.yml: `shasum`)

SHA-1 tells damage, not a forger: against that stands TLS, as it does for Pulumi's own CLI, which checks no plug-in.

Not ``PulumiCommand.install``: it runs whatever script get.pulumi.com serves that day, needs curl, checks no checksum,
shows nothing, starts over when it breaks off, and copies into place file by file.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import platform
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from gpuctl.cluster.errors import BadInput, GpuctlError

OnDownload = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Shows what takes its time: takes what is being done and its bytes (``None``: not known), gives what takes the
number of bytes that have come."""

_RELEASES = "https://get.pulumi.com/releases"
_ARCHITECTURES = {
    "x86_64": ("x64", "amd64"),
    "amd64": ("x64", "amd64"),
    "aarch64": ("arm64",) * 2,
    "arm64": ("arm64",) * 2,
}
"""By what ``uname -m`` says: the CLI's word, the plug-ins' word."""
_ALGORITHMS = {40: "sha1", 64: "sha256", 128: "sha512"}
"""By the digits of a digest."""
_NOT_THERE = (403, 404, 410)
"""A bucket that may not be listed, as that behind get.pulumi.com, answers 403 for what it does not have."""
_TRIES = 5
_TIMEOUT_S = 30.0
_CHUNK = 1 << 18


class DownloadFailed(GpuctlError):
    """The download failed and nothing was installed. What has come is kept where the next attempt can go on from it."""


class _Lost(Exception):
    """The connection was lost half-way."""


@dataclass(frozen=True, slots=True)
class Release:
    """An archive to download, and where its checksum is."""

    what: str
    """For people, such as ``Pulumi 3.272.0``."""
    url: str
    checksums: str
    """URL of the digests of all archives of this version."""
    must_be_listed: bool
    """Whether there is no release without such a file."""

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]

    def size(self) -> int | None:
        """Bytes, if the server tells. Raises ``DownloadFailed`` if it does not answer or has no such release."""
        try:
            with _opened(urllib.request.Request(self.url, method="HEAD"), self.what) as answer:
                return _length(answer)
        except HTTPError:  # a mirror that knows no HEAD
            return None
        except _Lost as error:
            raise DownloadFailed(f"{self.what} could not be downloaded: {error}", _reach()) from error


def cli(version: str) -> Release:
    """Raises ``BadInput`` for a machine that Pulumi is not released for."""
    url = f"{_releases()}/sdk"
    file = f"pulumi-v{version}-{_system()}-{_architecture()[0]}.tar.gz"
    return Release(f"Pulumi {version}", f"{url}/{file}", f"{url}/pulumi-{version}-checksums.txt", must_be_listed=True)


def plugin(name: str, version: str) -> Release:
    """Raises ``BadInput`` for a machine that Pulumi is not released for."""
    url = f"{_releases()}/plugins"
    file = f"pulumi-resource-{name}-v{version}-{_system()}-{_architecture()[1]}.tar.gz"
    checksums = f"{url}/pulumi-{name}_{version}_checksums.txt"
    return Release(f"plug-in {name} {version}", f"{url}/{file}", checksums, must_be_listed=False)


def download(
    release: Release, folder: Path, on_download: OnDownload, pause: Callable[[float], None] = time.sleep
) -> Path:
    """Download the archive to ``folder``, whole and checked; returns its path.

    Args:
        release: the archive.
        folder: keeps what has come if the download fails, for a later attempt to continue. Only one process at a time
            may use it.
        on_download: shows the progress (see ``OnDownload``).
        pause: sleeps for so many seconds between two attempts.

    Raises ``DownloadFailed``, and ``OSError`` if the folder does not take it.
    """
    digest = _published_digest(release)
    part = folder / f"{release.file}.part"
    was_begun = part.exists()
    _fetch(release, part, on_download, pause)
    if digest and _digest(part, _ALGORITHMS[len(digest)]) != digest:
        part.unlink()
        if was_begun:  # perhaps of another archive by that name
            return download(release, folder, on_download, pause)
        raise DownloadFailed(
            f"{release.url} does not match its checksum in {release.checksums}",
            "repeat it; if it persists, report it to the site",
        )
    whole = folder / release.file
    part.replace(whole)
    return whole


def _fetch(release: Release, part: Path, on_download: OnDownload, pause: Callable[[float], None]) -> None:
    """A connection that is lost is taken up again where it was, as long as it has brought something before."""
    with ExitStack() as shown:
        show: Callable[[int], None] | None = None
        for attempt in range(1, _TRIES + 1):
            there = part.stat().st_size if part.exists() else 0
            try:
                with _opened(_from(release.url, there), release.what) as answer:
                    start = there if answer.status == 206 else 0  # a server that knows no ranges sends all of it
                    length = _length(answer)
                    total = None if length is None else start + length
                    show = show or shown.enter_context(on_download(f"downloading {release.what}", total))
                    there = _receive(answer, part, start, show)
                if total is None or there >= total:
                    return
                lost = f"the connection was closed after {there} of {total} bytes"
            except HTTPError as error:
                if error.code == 416 and error.headers.get("Content-Range", "").endswith(f"/{there}"):
                    return  # all of it had come
                if error.code == 416:
                    part.unlink()
                lost = f"it answered {error.code}"
            except _Lost as error:
                if show is None:
                    raise DownloadFailed(f"{release.what} could not be downloaded: {error}", _reach()) from error
                lost = str(error)
            if attempt < _TRIES:
                pause(2.0 ** (attempt - 1))
    raise DownloadFailed(f"{release.what} could not be downloaded from {release.url}: {lost}", "repeat it to go on")


def _receive(answer: Any, part: Path, start: int, show: Callable[[int], None]) -> int:
    """Write an answer to the file ``part``, from byte ``start`` on; returns how many bytes are there then."""
    there = start
    show(there)
    with part.open("ab" if start else "wb") as file:
        while True:
            try:
                data = answer.read1(_CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _Lost(f"the connection was lost ({error})") from error
            if not data:
                return there
            file.write(data)
            there += len(data)
            show(there)


def _from(url: str, offset: int) -> urllib.request.Request:
    return urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})


def _opened(request: urllib.request.Request, what: str) -> Any:
    """Raises ``DownloadFailed`` for what is not there, ``_Lost`` if nobody answers, ``HTTPError`` for what may pass."""
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except HTTPError as error:
        if error.code in _NOT_THERE:
            raise DownloadFailed(f"{what} is not at {request.full_url} ({error.code})", _reach()) from error
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _Lost(f"{request.full_url} does not respond ({getattr(error, 'reason', error)})") from error


def _published_digest(release: Release) -> str | None:
    """The published digest; ``None`` if there is none."""
    try:
        with urllib.request.urlopen(release.checksums, timeout=_TIMEOUT_S) as answer:
            listed: str = answer.read().decode("ascii", "replace")
    except HTTPError as error:
        if error.code in _NOT_THERE and not release.must_be_listed:
            return None
        message = f"the checksums of {release.what} are not at {release.checksums} ({error.code})"
        raise DownloadFailed(message, _reach()) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        message = f"{release.what} could not be downloaded: {release.checksums} does not respond ({reason})"
        raise DownloadFailed(message, _reach()) from error
    for line in listed.splitlines():
        digest, _, name = line.partition(" ")
        if name.strip().removeprefix("*").removeprefix("./") == release.file and len(digest) in _ALGORITHMS:
            return digest.lower()
    raise DownloadFailed(f"{release.checksums} has no checksum of {release.file}", _reach())


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _length(answer: Any) -> int | None:
    told = answer.headers.get("Content-Length", "")
    return int(told) if told.isdigit() else None


def _reach() -> str:
    return f"a mirror of {_RELEASES} can be named by GPUCTL_PULUMI_RELEASES"


def _releases() -> str:
    url = (os.environ.get("GPUCTL_PULUMI_RELEASES") or _RELEASES).rstrip("/")
    if not url.startswith(("https://", "http://")):
        raise BadInput(f"GPUCTL_PULUMI_RELEASES={url} is not a URL", f"it replaces {_RELEASES}")
    return url


def _system() -> str:
    return "darwin" if sys.platform == "darwin" else "linux"


def _architecture() -> tuple[str, ...]:
    machine = platform.machine().lower()
    if machine not in _ARCHITECTURES:
        raise BadInput(f"Pulumi is not released for {machine}", "run gpuctl on x86_64 or arm64")
    return _ARCHITECTURES[machine]
