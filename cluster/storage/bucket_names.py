"""Which URLs a bucket can have, by the stores' own rules: a name that cannot be is told before anything is made.

Sources: Amazon S3 User Guide, "General purpose bucket naming rules"; Google Cloud Storage, "Bucket name requirements";
Azure, "Naming and Referencing Containers, Blobs, and Metadata". What is reserved for other things of S3, such as the
aliases of access points, is let pass: some of it takes objects.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.error_mapping import shown

SCHEMES = ("s3", "gs", "az", "file", "memory")
ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
"""Variables that obstore takes an endpoint from."""


class _Rule(NamedTuple):
    form: re.Pattern[str]
    said: str


_RULES = {
    "s3": _Rule(
        re.compile(r"(?=.{3,63}$)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9-]+(\.[a-z0-9-]+)*"),
        "an S3 bucket name has 3 to 63 lower-case letters, digits, dashes and single dots, a letter or digit at both"
        " ends, and is no IP address",
    ),
    "gs": _Rule(
        re.compile(r"(?=.{3,222}$)(?!\d+\.\d+\.\d+\.\d+$)(?!goog|.*google)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*"),
        "a Google Cloud bucket name has 3 to 63 lower-case letters, digits, dashes, underscores and dots, a letter or"
        " digit at both ends, is no IP address, and does not begin with goog or contain google",
    ),
    "az": _Rule(
        re.compile(r"(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*"),
        "an Azure container name has 3 to 63 lower-case letters, digits and single dashes, a letter or digit at both"
        " ends",
    ),
}
_ENDS = re.compile(r"[a-z0-9].*[a-z0-9]")
_ELSEWHERE = _Rule(re.compile(r"[A-Za-z0-9._-]+"), "a bucket name has letters, digits, dots, dashes and underscores")
"""What speaks a cloud's protocol at an endpoint of its own may have rules of its own."""
_OF_ENDPOINTS = ("endpoint", "endpoint_url", "base_url")


def parts_of(url: str) -> SplitResult:
    """The parts of a bucket's URL. Raises ``BadInput`` for one that no bucket can have."""
    if re.search(r"^\s|\s$|[\x00-\x1f\x7f]", url):  # urlsplit() would leave them out
        raise BadInput(f"{shown(url)!r} has a space at an end or a control character in it", "type it again")
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in SCHEMES:
        raise BadInput(
            f"{shown(url)!r} is not a bucket URL", f"use one of {', '.join(s + '://' for s in SCHEMES[:-1])}"
        )
    if parts.scheme in _RULES:
        if not parts.netloc:
            raise BadInput(f"{shown(url)!r} names no bucket", f"write it as {parts.scheme}://BUCKET/PREFIX")
        _check_name(url, parts)
        path = unquote(parts.path)
        if "//" in path or {".", ".."} & set(path.split("/")):  # obstore would take another prefix, or refuse it later
            raise BadInput(
                f"{shown(url)!r} has an empty part, '.' or '..' in its prefix", "write the prefix without it"
            )
    if parts.fragment:
        raise BadInput(f"{shown(url)!r} has a '#' in it", "write it as %23")
    return parts


def _check_name(url: str, parts: SplitResult) -> None:
    elsewhere = any(map(os.environ.get, ENDPOINTS)) or any(
        name.lower().endswith(_OF_ENDPOINTS) for name, _ in parse_qsl(parts.query)
    )
    rule = _ELSEWHERE if elsewhere else _RULES[parts.scheme]
    if parts.scheme == "az" and parts.netloc.endswith(".core.windows.net"):
        raise BadInput(f"{shown(url)!r} names a host", "write it as az://CONTAINER/PREFIX?account_name=ACCOUNT")
    if parts.netloc.startswith("arn:"):
        raise BadInput(f"{shown(url)!r} names an access point", "use its alias, which ends in -s3alias")
    if not rule.form.fullmatch(parts.netloc) or not (elsewhere or _ENDS.fullmatch(parts.netloc)):
        raise BadInput(f"{shown(url)!r} has a name that no bucket can have", rule.said)


def folder_of(url: str) -> Path:
    """The folder that ``file://`` URL names. Raises ``BadInput``."""
    parts = urlsplit(url)
    folder = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not folder.is_absolute():
        meant = Path(unquote(parts.netloc + parts.path)).expanduser().absolute()
        raise BadInput(f"{url!r} does not name a folder by its absolute path", f"did you mean {meant.as_uri()}?")
    if parts.query:
        raise BadInput(f"{url!r} has a '?' in it", "write it as %3F; a folder has no options")
    return folder
