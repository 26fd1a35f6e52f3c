"""How AWS is asked, with the credentials and the region of the environment as Amazon's own tools find them, and what
its refusals mean, in a line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.cloud import CredentialsRefused, Denied, needs

Connect = Callable[[str, str], Any]
"""A client of boto3 for a service such as ``ec2`` in a region; any thread may ask for one."""

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
_INVALID = (
    "AuthFailure",
    "IncompleteSignature",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
_LOG_IN = "log in (aws sso login, or aws configure), or set AWS_PROFILE"


def connecting() -> Connect:
    """Raises ``BadInput`` if boto3 is not installed, ``CredentialsRefused`` for a profile that is not there."""
    session, lock = _session(), threading.Lock()
    from botocore.config import Config

    config = Config(connect_timeout=10, read_timeout=60, max_pool_connections=32, retries={"mode": "standard"})

    def connect(service: str, region: str) -> Any:
        with lock, understood():  # a session is no thing for several threads
            return session.client(service, region_name=region, config=config)

    return connect


def usual_region() -> str:
    """Raises ``BadInput`` if the environment names none."""
    region: str | None = os.environ.get("AWS_REGION") or _session().region_name
    if not region:
        raise BadInput("no region is named", "add --region us-east-1, or set AWS_REGION")
    return region


def who(connect: Connect, region: str) -> dict[str, str]:
    """``Account`` and ``Arn`` of the caller. Any credentials that are valid may ask this. Raises ``GpuctlError``."""
    with understood():
        answer: dict[str, str] = connect("sts", region).get_caller_identity()
    return answer


def own(region: str) -> str:
    """See ``cloud.Cloud.account``."""
    return who(connecting(), region)["Account"]


@contextmanager
def understood() -> Iterator[None]:
    """What botocore raises within becomes a ``GpuctlError``."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        raise _refusal(error) from error
    except BotoCoreError as error:
        raise _no_answer(error) from error
    except ResponseParserError as error:
        raise GpuctlError("what answers is not AWS's API", "is there a proxy in between?") from error


def _session() -> Any:
    # It weighs a quarter of a second, which verbs that ask no cloud should not take.
    try:
        import boto3
    except ModuleNotFoundError as error:
        raise needs("aws", error) from error
    with understood():
        return boto3.Session()


def _refusal(error: Any) -> GpuctlError:
    """Of a botocore ``ClientError``: AWS has answered."""
    code = error.response["Error"].get("Code", "")
    said = " ".join(error.response["Error"].get("Message", "").split())
    if code in _EXPIRED:
        return CredentialsRefused("the AWS credentials have expired", _LOG_IN)
    if code in _INVALID:
        # A region that the account has not enabled answers so too.
        return CredentialsRefused(f"AWS does not take these credentials here ({code})", _LOG_IN)
    if code in _DENIED:
        return Denied(f"these AWS credentials may not call {error.operation_name}", "ask who manages the account")
    if code == "OptInRequired":
        return Denied(
            f"this AWS account may not call {error.operation_name} here", "enable the region, or take another"
        )
    if code.isdigit():  # a status, with a page for people instead of an answer
        return GpuctlError(f"AWS answered {code} to {error.operation_name}", "try again later")
    return GpuctlError(f"AWS refused {error.operation_name}: {code}: {said[:200]}")


def _no_answer(error: Exception) -> GpuctlError:
    """Of a ``BotoCoreError``: AWS was not asked, or has not answered."""
    name, said = type(error).__name__, " ".join(str(error).split())
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return CredentialsRefused("there are no AWS credentials", _LOG_IN)
    if name == "ProfileNotFound":
        return CredentialsRefused(f"AWS: {said}", "see: aws configure list-profiles")
    if name in ("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError", "LoginRefreshRequired"):
        return CredentialsRefused("the AWS log-in has expired", _LOG_IN)
    if name in ("CredentialRetrievalError", "MetadataRetrievalError"):
        return CredentialsRefused(f"AWS credentials cannot be had: {said[:200]}", _LOG_IN)
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionError", "InvalidRegionError"):
        return GpuctlError(f"AWS does not answer: {said[:200]}", "is the region spelled right, and the network up?")
    return GpuctlError(f"AWS: {said[:200]}")
