"""Calls to AWS, with the credentials of the environment as Amazon's own tools find them, and what its refusals mean, in
a line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import CredentialsRefused, Denied
from gpuctl.stacks.clouds.aws.partition import home
from gpuctl.stacks.clouds.extras import needs

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


def who(connect: Connect, region: str) -> dict[str, str]:
    """``Account`` and ``Arn`` of the caller. Any credentials that are valid may ask this. Raises ``GpuctlError``."""
    with understood():
        answer: dict[str, str] = connect("sts", region).get_caller_identity()
    return answer


def own(region: str) -> str:
    """The account's own id; see ``Cloud.account``."""
    return who(connecting(), region)["Account"]


def regions(connect: Connect, at: str) -> dict[str, bool]:
    """All regions of the partition that ``at`` is in, and whether the account has enabled each. Raises
    ``GpuctlError``."""
    with understood():
        told = connect("ec2", home(at)).describe_regions(AllRegions=True)["Regions"]
    return {one["RegionName"]: one.get("OptInStatus") != "not-opted-in" for one in told}


def unknown_region(region: str, known: Iterable[str]) -> BadInput:
    """The error for a region that AWS does not have."""
    near = get_close_matches(region, list(known), n=3, cutoff=0.6)
    return BadInput(f"unknown region {region!r}", f"for example {', '.join(near or ['us-east-1', 'eu-west-1'])}")


@contextmanager
def understood() -> Iterator[None]:
    """Turn what botocore raises within into a ``GpuctlError``."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        raise _refusal(error) from error
    except BotoCoreError as error:
        raise _no_answer(error) from error
    except ResponseParserError as error:
        raise GpuctlError("the response is not from AWS's API", "is there a proxy in between?") from error


def _session() -> Any:
    # It weighs a quarter of a second, which verbs that ask no cloud should not take.
    try:
        import boto3
        from botocore.session import get_session
    except ModuleNotFoundError as error:
        raise needs("aws", error) from error
    with understood():
        session = get_session()
        session.register_component("data_loader", _service_models(session.get_config_variable("data_path")))
        return boto3.Session(botocore_session=session)


@cache
def _service_models(search_path: str | None) -> Any:
    """Botocore's knowledge of each service. It takes a second to read, so all sessions share it; credentials they do
    not, since somebody may log in anew while ``up`` waits."""
    from botocore.loaders import create_loader

    return create_loader(search_path)


def _refusal(error: Any) -> GpuctlError:
    """The error for a botocore ``ClientError``: AWS has answered."""
    code = error.response["Error"].get("Code", "")
    said = " ".join(error.response["Error"].get("Message", "").split())
    if code in _EXPIRED:
        return CredentialsRefused("the AWS credentials have expired", _LOG_IN)
    if code in _INVALID:
        # A region that the account has not enabled answers so too.
        return CredentialsRefused(f"AWS rejects these credentials here ({code})", _LOG_IN)
    if code in _DENIED:
        return Denied(f"these AWS credentials may not call {error.operation_name}", "ask the account's administrator")
    if code == "OptInRequired":
        return Denied(f"this AWS account may not call {error.operation_name} here", "enable the region, or use another")
    if code.isdigit():  # a status, with a page for people instead of an answer
        return GpuctlError(f"AWS answered {code} to {error.operation_name}", "try again later")
    return GpuctlError(f"AWS refused {error.operation_name}: {code}: {said[:200]}")


def _no_answer(error: Exception) -> GpuctlError:
    """The error for a ``BotoCoreError``: AWS was not asked, or has not answered."""
    name, said = type(error).__name__, " ".join(str(error).split())
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return CredentialsRefused("no AWS credentials found", _LOG_IN)
    if name == "ProfileNotFound":
        return CredentialsRefused(f"AWS: {said}", "see: aws configure list-profiles")
    if name in ("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError", "LoginRefreshRequired"):
        return CredentialsRefused("the AWS login has expired", _LOG_IN)
    if name in ("CredentialRetrievalError", "MetadataRetrievalError"):
        return CredentialsRefused(f"cannot get AWS credentials: {said[:200]}", _LOG_IN)
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionError", "InvalidRegionError"):
        return GpuctlError(f"AWS does not respond: {said[:200]}", "check the region's name and the network")
    return GpuctlError(f"AWS: {said[:200]}")
