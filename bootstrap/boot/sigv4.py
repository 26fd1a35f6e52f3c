"""Signatures of AWS, version 4. Source: IAM user guide, "Create a signed AWS API request"."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, quote, urlsplit

from .metadata import Credentials


def signed(
    method: str,
    url: str,
    region: str,
    service: str,
    credentials: Credentials,
    headers: Mapping[str, str],
    body: bytes,
    now: Callable[[], float] = time.time,
) -> dict[str, str]:
    """``headers``, those that must be there and the signature over all of them. The path in ``url`` is quoted."""
    parts = urlsplit(url)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now()))
    digest = hashlib.sha256(body).hexdigest()
    told = {**headers, "Host": parts.netloc, "X-Amz-Date": stamp, "X-Amz-Content-Sha256": digest}
    if credentials.token:
        told["X-Amz-Security-Token"] = credentials.token
    lines = {name.lower(): " ".join(value.split()) for name, value in told.items()}
    names = ";".join(sorted(lines))
    pairs = sorted((quote(k, safe=""), quote(v, safe="")) for k, v in parse_qsl(parts.query, keep_blank_values=True))
    canonical = "\n".join(
        [
            method,
            parts.path or "/",
            "&".join(f"{key}={value}" for key, value in pairs),
            *(f"{name}:{lines[name]}" for name in sorted(lines)),
            "",
            names,
            digest,
        ]
    )
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    proof = hmac.digest(key, text.encode(), "sha256").hex()
    told["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key}/{scope}, SignedHeaders={names}, Signature={proof}"
    )
    return told
