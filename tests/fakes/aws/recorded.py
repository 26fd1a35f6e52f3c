"""AWS's own answers, for what moto cannot do or never says. A real client reads them with botocore's parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from botocore.awsrequest import AWSResponse

from gpuctl.stacks.clouds.aws.client import Connect, connecting

Answers = Mapping[tuple[str, str], str | tuple[int, str]]
"""Body, or status and body, by service and operation, such as ``("ec2", "DescribePlacementGroups")``."""


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._body


def answering(answers: Answers, asked: list[bytes] | None = None) -> Connect:
    """Clients that answer so; all else goes to the server. What they are asked goes into ``asked``."""
    real = connecting()

    def connect(service: str, region: str) -> Any:
        client = real(service, region)
        for (of, operation), answer in answers.items():
            if of == service:
                event = client.meta.service_model.service_id.hyphenize()
                client.meta.events.register(f"before-send.{event}.{operation}", _reply(answer, asked))
        return client

    return connect


def _reply(answer: str | tuple[int, str], asked: list[bytes] | None) -> Callable[..., AWSResponse]:
    status, body = (200, answer) if isinstance(answer, str) else answer

    def reply(request: Any, **_: Any) -> AWSResponse:
        if asked is not None:
            asked.append(request.body if isinstance(request.body, bytes) else str(request.body).encode())
        return response(request.url, status, body)

    return reply


def response(url: str, status: int, body: str) -> AWSResponse:
    """As it comes from the wire."""
    return AWSResponse(url, status, {}, _Raw(body.encode()))


def refusal(code: str, message: str = "no", status: int = 403) -> tuple[int, str]:
    """As EC2 refuses; see ``query_refusal``."""
    return status, (
        f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
        "<RequestID>r-1</RequestID></Response>"
    )


def query_refusal(code: str, message: str = "no", status: int = 403) -> tuple[int, str]:
    """As STS and IAM refuse."""
    return status, (
        f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        "<RequestId>r-1</RequestId></ErrorResponse>"
    )


def json_refusal(code: str, message: str = "no", status: int = 400) -> tuple[int, str]:
    """As Service Quotas refuses."""
    return status, json.dumps({"__type": code, "message": message})
