"""The store through which a round's processes learn each other's ports."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gpuctl.trainers.launchers.key_value_store import KeyValueStore, get, put


@pytest.fixture
def port() -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    number: int = listening.getsockname()[1]
    store = KeyValueStore(listening)
    yield number
    store.close()


def _ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_it_answers_as_horovods_own_does(port: int) -> None:
    assert _ask(port, "GET", "/global/1") == (404, b"")
    assert _ask(port, "PUT", "/global/1", b"\0\xff")[0] == 200
    assert _ask(port, "GET", "/global/1") == (200, b"\0\xff")
    assert _ask(port, "GET", "/global/2")[0] == 404
    assert _ask(port, "DELETE", "/global/1")[0] == 200
    assert _ask(port, "GET", "/global/1")[0] == 404


def test_a_value_may_be_empty_and_not_too_large(port: int) -> None:
    deadline = time.monotonic() + 60
    put("127.0.0.1", port, "empty", b"", deadline)
    assert get("127.0.0.1", port, "empty", deadline) == b""
    assert _ask(port, "PUT", "/large", b"", **{"Content-Length": str(1 << 30)})[0] == 413


def test_whoever_comes_first_waits_for_the_others(port: int) -> None:
    found: list[bytes] = []
    deadline = time.monotonic() + 60
    waiting = threading.Thread(target=lambda: found.append(get("127.0.0.1", port, "later", deadline)))
    waiting.start()
    put("127.0.0.1", port, "later", b"here", deadline)
    waiting.join(60)
    assert found == [b"here"]


def test_the_wait_has_an_end_and_says_what_it_was_for(port: int) -> None:
    with pytest.raises(TimeoutError, match="gpuctl/3 was not told"):
        get("127.0.0.1", port, "gpuctl/3", time.monotonic())
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(TimeoutError, match=r"nobody answers at 127\.0\.0\.1 port \d+"):
            put("127.0.0.1", nobody.getsockname()[1], "x", b"", time.monotonic())


def test_its_port_is_free_when_it_is_closed() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    KeyValueStore(listening).close()
    socket.create_server(address).close()
