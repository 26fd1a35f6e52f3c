"""Whether a port can be reached: real connections, all at once, each with a deadline."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from gpuctl.cluster.network.records import ConnectAttempt

PATIENCE_S = 3.0
"""Enough for a lost first packet, which is sent again after one second."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    node: str
    address: str
    port: int
    service: str


def contacts(targets: Iterable[ProbeTarget], patience_s: float = PATIENCE_S) -> list[ConnectAttempt]:
    """One attempt each, in order. It takes as long as the slowest, at most ``patience_s``. What listens learns nothing:
    the connection is closed as soon as it stands."""

    async def all_of_them() -> list[ConnectAttempt]:
        return await asyncio.gather(*(_contact(target, patience_s) for target in targets))

    return asyncio.run(all_of_them())


async def _contact(target: ProbeTarget, patience_s: float) -> ConnectAttempt:
    began = time.monotonic()
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(target.address, target.port), patience_s)
    except (OSError, TimeoutError) as error:
        return _found(target, None, _why(error))
    took_ms = (time.monotonic() - began) * 1000
    writer.transport.abort()
    return _found(target, round(took_ms, 2), "")


def _found(target: ProbeTarget, took_ms: float | None, why: str) -> ConnectAttempt:
    return ConnectAttempt(
        node=target.node,
        address=target.address,
        port=target.port,
        service=target.service,
        took_ms=took_ms,
        why=why,
    )


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if error.errno is None or isinstance(error, TimeoutError):
        return "timed out"
    return os.strerror(error.errno).lower()
