"""How the makers of AWS (``made_aws``, ``made_aws_network``) ask it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import boto3
from botocore.exceptions import ClientError

Record = dict[str, Any]

_GONE = ("NotFound", "NotFoundException", "NoSuchEntity", "NoSuchBucket", "Unknown")
_clients: dict[tuple[str, str], Any] = {}
_making = threading.Lock()


def client(service: str) -> Any:
    """In the provider's region."""
    region = os.environ.get("AWS_REGION", "us-east-1")
    with _making:  # boto3's session is not safe for threads, its clients are
        if (service, region) not in _clients:
            _clients[service, region] = boto3.client(service, region_name=region)
        return _clients[service, region]


def tags(inputs: Record) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in inputs.get("tags", {}).items()]


def tagged(inputs: Record, kind: str) -> list[Record]:
    return [{"ResourceType": kind, "Tags": tags(inputs)}]


def named(inputs: Record) -> str:
    return str(inputs.get("name") or f"{inputs['namePrefix']}{os.urandom(4).hex()}")


def only(keys: set[str], before: Record, inputs: Record) -> None:
    """Raises ``NotImplementedError`` if anything else was changed."""
    if other := {key for key in {*before, *inputs} if before.get(key) != inputs.get(key)} - keys:
        raise NotImplementedError(f"the plug-in cannot update {', '.join(sorted(other))}")


def retagged(id_: str, before: Record, inputs: Record) -> Record:
    only({"tags"}, before, inputs)
    client("ec2").create_tags(Resources=[id_], Tags=tags(inputs))
    return {}


def gone_or(take_away: Callable[[str], object]) -> Callable[[str, Record], None]:
    """As Terraform's provider does: what is not there any more is taken away."""

    def unmake(id_: str, _: Record) -> None:
        try:
            take_away(id_)
        except ClientError as error:
            if not _is_gone(error):
                raise

    return unmake


def seen(service: str, call: str, key: str, listed: str) -> Callable[[str], bool]:
    """By ``call(**{key: [id]})``."""

    def look(id_: str) -> bool:
        try:
            return bool(getattr(client(service), call)(**{key: [id_]})[listed])
        except ClientError as error:
            if _is_gone(error):
                return False
            raise

    return look


def of_iam(call: str, *keys: str) -> Callable[[str], bool]:
    """By ``call`` with these parts of its id."""

    def look(id_: str) -> bool:
        try:
            getattr(client("iam"), call)(**dict(zip(keys, id_.split(":"), strict=True)))
        except ClientError as error:
            if _is_gone(error):
                return False
            raise
        return True

    return look


def _is_gone(error: ClientError) -> bool:
    return str(error.response["Error"]["Code"]).rpartition(".")[2] in _GONE
