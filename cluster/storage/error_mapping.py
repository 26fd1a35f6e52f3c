"""What a bucket's failures mean: obstore's errors in our words, and which of them a retry may fix.

obstore 0.12 tells little by type (a listing that is refused, a bad request and a broken connection are all
``GenericError``; a missing bucket is a missing file), so the status and the store's own error code are read from the
text.
"""

from __future__ import annotations

import errno
import re

from gpuctl.cluster.errors import GpuctlError, NoBucket, StoreError, StoreUnavailable

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_EXPIRED_WORDS = ("The token is expired", "Signature not valid in the specified time frame")
"""Azure's, of a token and of a shared access signature: it has one code for all that is wrong with credentials."""
_UNKNOWN = ("InvalidAccessKeyId", "InvalidToken", "AuthenticationFailed", "InvalidAuthenticationInfo")
"""Of credentials that never were, or are not any more."""
_GARBLED = (
    "BadDigest",
    "InvalidDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
    "Md5Mismatch",
    "Crc64Mismatch",
    "IncompleteBody",
)
_FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EROFS}
_WRONG = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_ROOM = ("QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull")
"""Of Ceph, which answers so with 403, and of MinIO, with 400 and 507."""
_SAYS_WHERE = (
    "account_name",
    "azure_storage_account_name",
    "base_url",
    "region",
    "aws_region",
    "endpoint",
    "aws_endpoint",
)
"""Options of a URL that are no secret, and without which it opens another bucket or none."""
_PASSING_4XX = {408, 409, 412, 425, 429}
"""Client errors by number that another try may get past."""


def in_our_words(error: Exception, url: str, key: str) -> GpuctlError:
    """``StoreError`` if the store has refused, ``StoreUnavailable`` if another try may go better."""
    text = str(error)
    code, status = _code(text), _status(text)
    number = _number(text) if url.startswith("file:") else 0
    bucket = shown(url)
    why = _why(text)
    if re.search(r"169\.254\.\d+\.\d+|metadata\.google\.internal", text):
        # The machine's own identity is asked last: on a node it may have stumbled, elsewhere there is none.
        names = _CREDENTIALS.get(url.partition(":")[0], "the store's own variables")
        return StoreUnavailable(f"found no credentials for the bucket {bucket}", f"set {names} in the environment")
    if isinstance(error, ValueError):
        return StoreError(f"{key!r} cannot be a key in the bucket {bucket}: {why}", "use other names")
    if isinstance(error, FileNotFoundError) or is_no_bucket(error):
        return NoBucket(f"there is no bucket {bucket}: {why}", "create it first, or check its name and region")
    if is_garbled(error):
        return StoreError(
            f"the bucket {bucket} rejects {key!r} each time, as it arrives corrupted: {why}",
            "check this machine's memory and network",
        )
    if number in _FULL or status == 507 or code in _NO_ROOM:
        return StoreUnavailable(f"the bucket {bucket} is full: {why}", "free some space there")
    if code == "RequestTimeTooSkewed":
        return StoreError(f"the bucket {bucket} refuses {key!r}: {why}", "set this machine's clock")
    if _is_permission(error) or status in (401, 403) or number in _FORBIDDEN:
        return StoreError(f"the bucket {bucket} refuses {key!r}: {why}", "check its credentials and its policy")
    if "redirect without LOCATION" in text:
        return StoreError(f"the bucket {bucket} is in another region: {why}", "add ?region=… to its URL")
    passing = status in _PASSING_4XX or code == "RequestTimeout"
    if (400 <= status < 500 and not passing) or status == 501 or number in _WRONG:
        return StoreError(f"the bucket {bucket} does not accept {key!r}: {why}", "check its URL and its options")
    return StoreUnavailable(f"the bucket {bucket} did not answer for {key!r}: {why}", "try again")


def expired(error: Exception, url: str, in_vain_s: float | None) -> GpuctlError:
    """The error for credentials that have expired (see ``has_expired``): an outage, or a refusal once new ones were
    awaited ``in_vain_s``."""
    bucket, why = shown(url), _why(str(error))
    names = _CREDENTIALS.get(url.partition(":")[0], "the store's own variables")
    hint = f"set {names} and start this again, or use the machine's identity, which renews itself"
    if in_vain_s is None:
        return StoreUnavailable(f"the credentials for the bucket {bucket} have expired: {why}", hint)
    waited = f"and {in_vain_s:.0f} s brought no new ones"
    return StoreError(f"the credentials for the bucket {bucket} have expired, {waited}: {why}", hint)


def has_expired(error: Exception, served: bool) -> bool:
    """The store does not take our credentials any more. ``served``: it has taken them before.

    Source: Amazon S3, "List of error codes"; Google Cloud Storage answers 401 to any token that is not valid.
    """
    text = str(error)
    if _code(text) in _EXPIRED or any(words in text for words in _EXPIRED_WORDS):
        return True
    return served and (_status(text) == 401 or _code(text) in _UNKNOWN)


def is_garbled(error: Exception) -> bool:
    """What arrived is not what was sent; nothing is written."""
    return _code(str(error)) in _GARBLED


def is_no_bucket(error: Exception) -> bool:
    """It is the bucket that is missing, not the object."""
    text = str(error)
    # Azure deletes in batches, and of what is wrong within one obstore tells the message only.
    return _code(text) in _NO_BUCKET or "The specified container does not exist" in text


def is_past_the_end(error: Exception) -> bool:
    """The object is there, and ends before the range that was asked for begins."""
    text = str(error)
    # The last is how Azurite speaks of an object without content.
    return _status(text) == 416 or "StartTooLarge" in text or '"bytes 0--1/0"' in text


def conflicts(error: Exception) -> bool:
    """S3's answer while another request for the key is under way: nothing is decided, and the put is to be repeated.

    Source: Amazon S3 user guide, "Conditional writes", 409 ConditionalRequestConflict.
    """
    return _code(str(error)) in ("ConditionalRequestConflict", "OperationAborted")


def shown(url: str) -> str:
    """``url`` for people: without its options, which may hold a secret."""
    return url.partition("?")[0]


def to_reopen(url: str) -> str:
    """``url`` for people to type again: with those options that say where it is, and none that may be a secret.

    >>> to_reopen("az://data/demo?account_name=lab&sas_key=sv%3D1")
    'az://data/demo?account_name=lab'
    """
    base, _, query = url.partition("?")
    told = [part for part in query.split("&") if part.partition("=")[0].lower() in _SAYS_WHERE]
    return f"{base}?{'&'.join(told)}" if told else base


def _is_permission(error: Exception) -> bool:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    return isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)


def _status(text: str) -> int:
    found = re.search(r"(?:status code: |\(code: )(\d{3})", text)  # of the answer, or of one in Azure's batch
    return int(found[1]) if found else 0


def _code(text: str) -> str:
    found = re.search(r"<Code>(\w+)</Code>", text)
    return found[1] if found else ""


def _number(text: str) -> int:
    found = re.search(r"\(os error (\d+)\)", text)
    return int(found[1]) if found else 0


def _why(text: str) -> str:
    """One short line: the store's own code and message, or the cause that obstore's debug output ends with."""
    if code := _code(text):
        message = re.search(r"<Message>\s*([^<\n]*)", text)  # Azure's has more lines
        told = message[1].strip().rstrip(".") if message else ""
        return f"{code}, {told}" if told else code
    head, _, debug = text.partition("\n\nDebug source:")
    if "error sending request" in head:
        cause = re.findall(r'(?:message|error): "([^"]+)"', debug)
        return cause[-1] if cause else "it took too long" if "TimedOut" in debug else "the connection broke"
    return first_line(head)


def first_line(text: str) -> str:
    """The first line of an error's text, without obstore's name for the store."""
    line = text.strip().split("\n", 1)[0]
    return re.sub(r"^Generic \w+ error: ", "", line).rstrip(".") or "unknown"
