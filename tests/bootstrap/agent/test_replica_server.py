"""The copies of checkpoints that a node serves and takes, asked over HTTP."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.agent.replica_server import ReplicaServer
from gpuctl.cluster.checkpoints.replica_layout import SCHEME, signed
from gpuctl.cluster.shared_key import Session
from gpuctl.trainers.checkpoint.replicas import ReplicaConnection

SAVE, OLD = "100-r3.a1b2-7", "50-r3.a1b2-6"
PART = f"{OLD}+00003-0001"
WHERE = f"/job-1/{SAVE}/{PART}"
CONTENT = bytes(range(256)) * 10_000


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    server = ReplicaServer(tmp_path, "secret")
    yield server.start("127.0.0.1")
    server.stop()


@pytest.fixture
def line(port: int) -> Iterator[ReplicaConnection]:
    line = ReplicaConnection(f"127.0.0.1:{port}", "secret", 10)
    yield line
    line.close()


def ask(line: ReplicaConnection, method: str, where: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    line.ask(method, where, {name.replace("_", "-"): value for name, value in headers.items()}, memoryview(body))
    answer = line.getresponse()
    return answer.status, answer.read()


class Caller:
    """Makes codes with any token, and does not mind that the server has another."""

    def __init__(self, port: int, token: str) -> None:
        self.line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        self.line.request("GET", "/", headers={"X-Nonce": "1"})
        self._session = Session(token, "1", self.line.getresponse().read().decode())

    def code(self, method: str, path: str, headers: dict[str, str]) -> str:
        return f"{SCHEME} {self._session.code('caller', 1, *signed(method, path, headers))}"


def file_of(folder: Path, save: str = SAVE) -> Path:
    return folder / "job-1" / "tier" / save / PART


def test_what_was_put_is_served_in_ranges_over_one_connection(tmp_path: Path, line: ReplicaConnection) -> None:
    assert ask(line, "GET", WHERE, Range="bytes=0-9")[0] == 404
    assert ask(line, "PUT", WHERE, CONTENT) == (201, b"")
    assert file_of(tmp_path).read_bytes() == CONTENT
    assert ask(line, "GET", WHERE, Range="bytes=1000-1_000_999".replace("_", "")) == (206, CONTENT[1000:1_001_000])
    assert ask(line, "GET", WHERE, Range="bytes=2559990-9999999") == (206, CONTENT[-10:])
    assert ask(line, "GET", WHERE, Range="bytes=9999999-99999999") == (206, b"")
    assert ask(line, "GET", WHERE) == (200, CONTENT)


def test_a_neighbour_is_reached_by_ipv6_too(tmp_path: Path) -> None:
    server = ReplicaServer(tmp_path, "secret")
    place = f"::1:{server.start('::1')}"  # as ``ReplicaMap`` has it
    line = ReplicaConnection(place, "secret", 10)
    try:
        assert ask(line, "PUT", WHERE, CONTENT) == (201, b"")
    finally:
        line.close()
        server.stop()
    assert file_of(tmp_path).read_bytes() == CONTENT


def test_a_part_that_another_save_has_is_not_sent_again(tmp_path: Path, line: ReplicaConnection) -> None:
    assert ask(line, "PUT", WHERE, X_Same_As=OLD)[0] == 404
    assert ask(line, "PUT", f"/job-1/{OLD}/{PART}", CONTENT)[0] == 201
    assert ask(line, "PUT", WHERE, X_Same_As=OLD)[0] == 201
    assert file_of(tmp_path).samefile(file_of(tmp_path, OLD))
    assert ask(line, "PUT", WHERE, X_Same_As="../../etc")[0] == 404


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("token", ["", "Secret", "secret2"])
def test_nobody_without_the_token(tmp_path: Path, port: int, method: str, token: str) -> None:
    file_of(tmp_path).parent.mkdir(parents=True)
    file_of(tmp_path).write_bytes(b"old")
    stranger = Caller(port, token)
    code = stranger.code(method, WHERE, {"Content-Length": "3"})
    stranger.line.request(method, WHERE, b"new", {"Authorization": code})
    assert stranger.line.getresponse().status == 401
    stranger.line.close()
    assert file_of(tmp_path).read_bytes() == b"old"


def test_what_was_said_once_counts_neither_again_nor_elsewhere(
    tmp_path: Path, port: int, line: ReplicaConnection
) -> None:
    heard: list[tuple[Any, ...]] = []
    send = line.request

    def listened(*request: Any, **more: Any) -> None:
        heard.append(request)
        send(*request, **more)

    line.request = listened  # type: ignore[method-assign]
    assert ask(line, "PUT", WHERE, b"old")[0] == 201
    _, (method, path, _, headers) = heard
    line.request(method, path, b"new", headers)
    assert line.getresponse().status == 401
    other = ReplicaConnection(f"127.0.0.1:{port}", "secret", 10)
    assert ask(other, "GET", WHERE) == (200, b"old")
    other.request(method, path, b"new", headers)
    assert other.getresponse().status == 401
    other.close()
    assert file_of(tmp_path).read_bytes() == b"old"


@pytest.mark.parametrize(
    ("path", "headers"),
    [(f"/job-2/{SAVE}/{PART}", {}), (WHERE, {"Range": "bytes=0-9"}), (WHERE, {"X-Same-As": OLD})],
    ids=["another job", "another range", "another part"],
)
def test_a_code_speaks_for_one_request(port: int, path: str, headers: dict[str, str]) -> None:
    asked = ReplicaConnection(f"127.0.0.1:{port}", "secret", 10)
    send = asked.request
    asked.request = lambda method, where, *rest, **more: (  # type: ignore[method-assign]
        send(method, where, **more) if where == "/" else send(method, path, rest[0], {**rest[1], **headers})
    )
    assert ask(asked, "PUT", WHERE)[0] == 401
    asked.close()


def test_nothing_is_sent_to_who_only_answers_at_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        heard = bytearray()

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                heard.extend(connection.recv(10_000))
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Code: 00\r\nContent-Length: 4\r\n\r\nabcd")
                heard.extend(connection.recv(10_000))

        thread = threading.Thread(target=answer)
        thread.start()
        line = ReplicaConnection(f"127.0.0.1:{stranger.getsockname()[1]}", "secret", 10)
        with pytest.raises(ConnectionError, match="not the cluster's node"):
            ask(line, "PUT", WHERE, CONTENT)
        line.close()
        thread.join(10)
    assert heard.startswith(b"GET / ")
    assert b"secret" not in heard
    assert CONTENT[:100] not in heard


@pytest.mark.parametrize(
    "where", ["/", "/job-1", f"/../{SAVE}/{PART}", f"/job-1/../{PART}", f"/job-1/{SAVE}/..%2f", f"/job-1/{SAVE}/a/b"]
)
def test_no_path_leads_out_of_the_folder(tmp_path: Path, line: ReplicaConnection, where: str) -> None:
    assert ask(line, "PUT", where, b"x")[0] == 404
    assert list(tmp_path.rglob("*")) == []


def test_what_is_cut_off_leaves_nothing_and_the_next_one_is_served(tmp_path: Path, port: int) -> None:
    caller = Caller(port, "secret")
    code = caller.code("PUT", WHERE, {"Content-Length": "9"})
    cut = caller.line.sock
    cut.sendall(f"PUT {WHERE} HTTP/1.1\r\nAuthorization: {code}\r\nContent-Length: 9\r\n\r\nabc".encode())
    cut.shutdown(socket.SHUT_WR)
    assert cut.recv(1000) == b"", "no answer but the end"
    cut.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    line = ReplicaConnection(f"127.0.0.1:{port}", "secret", 10)
    assert ask(line, "PUT", WHERE, CONTENT)[0] == 201
    line.close()
