"""The copies of checkpoints that a node serves and takes, asked over HTTP."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.bootstrap.agent.replica_server import ReplicaServer

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
def line(port: int) -> Iterator[http.client.HTTPConnection]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    yield line
    line.close()


def ask(
    line: http.client.HTTPConnection, method: str, where: str, body: bytes = b"", token: str = "secret", **headers: str
) -> tuple[int, bytes]:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    line.request(method, where, body, {"Authorization": f"Bearer {token}", **told})
    answer = line.getresponse()
    return answer.status, answer.read()


def file_of(folder: Path, save: str = SAVE) -> Path:
    return folder / "job-1" / "tier" / save / PART


def test_what_was_put_is_served_in_ranges_over_one_connection(tmp_path: Path, line: http.client.HTTPConnection) -> None:
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
    line = http.client.HTTPConnection(place, timeout=10)
    try:
        assert ask(line, "PUT", WHERE, CONTENT) == (201, b"")
    finally:
        line.close()
        server.stop()
    assert file_of(tmp_path).read_bytes() == CONTENT


def test_a_part_that_another_save_has_is_not_sent_again(tmp_path: Path, line: http.client.HTTPConnection) -> None:
    assert ask(line, "PUT", WHERE, X_Same_As=OLD)[0] == 404
    assert ask(line, "PUT", f"/job-1/{OLD}/{PART}", CONTENT)[0] == 201
    assert ask(line, "PUT", WHERE, X_Same_As=OLD)[0] == 201
    assert file_of(tmp_path).samefile(file_of(tmp_path, OLD))
    assert ask(line, "PUT", WHERE, X_Same_As="../../etc")[0] == 404


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("token", ["", "Secret", "secret2"])
def test_nobody_without_the_token(tmp_path: Path, line: http.client.HTTPConnection, method: str, token: str) -> None:
    file_of(tmp_path).parent.mkdir(parents=True)
    file_of(tmp_path).write_bytes(b"old")
    assert ask(line, method, WHERE, b"new", token)[0] == 401
    assert file_of(tmp_path).read_bytes() == b"old"


@pytest.mark.parametrize(
    "where", ["/", "/job-1", f"/../{SAVE}/{PART}", f"/job-1/../{PART}", f"/job-1/{SAVE}/..%2f", f"/job-1/{SAVE}/a/b"]
)
def test_no_path_leads_out_of_the_folder(tmp_path: Path, line: http.client.HTTPConnection, where: str) -> None:
    assert ask(line, "PUT", where, b"x")[0] == 404
    assert list(tmp_path.rglob("*")) == []


def test_what_is_cut_off_leaves_nothing_and_the_next_one_is_served(tmp_path: Path, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as cut:
        cut.sendall(f"PUT {WHERE} HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: 9\r\n\r\nabc".encode())
        cut.shutdown(socket.SHUT_WR)
        assert cut.recv(1000) == b"", "no answer but the end"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    assert ask(line, "PUT", WHERE, CONTENT)[0] == 201
    line.close()
