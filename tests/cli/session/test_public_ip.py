"""``--ssh-from me``, with a server on loopback that tells addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cli.session.public_ip import my_network
from gpuctl.cluster.errors import GpuctlError
from tests.fakes.user import KEY


class Teller(ThreadingHTTPServer):
    """Answers every request with what it ``tells``."""

    tells = b"198.51.100.7\n"
    asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def teller() -> Iterator[Teller]:
    class Exchange(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            server.asked += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(server.tells)

    server = Teller(("127.0.0.1", 0), Exchange)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_i_am_one_address(teller: Teller) -> None:
    assert my_network(teller.url) == "198.51.100.7/32"


@pytest.mark.parametrize("told", [b"<html>log in first</html>", b"2001:db8::1", b"", b"0.0.0.0/0", b"\xff\xfe"])
def test_what_is_no_address_lets_nobody_in(teller: Teller, told: bytes) -> None:
    teller.tells = told
    with pytest.raises(GpuctlError, match=r"did not return an IPv4 address: .*; give it yourself"):
        my_network(teller.url)


def test_nobody_who_tells_it_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(GpuctlError, match=r"cannot find your public address at .*timed out; give it yourself"):
            my_network(url, timeout_s=0.2)
    with pytest.raises(GpuctlError, match=r"cannot find your public address at .*refused"):
        my_network(url)


@pytest.mark.slow
def test_a_dry_run_asks_nobody_and_says_what_stands_for_the_address(teller: Teller, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519.pub").write_text(KEY)
    command = [sys.executable, "-m", "gpuctl.cli.main", "up", "--provider", "aws", "--type", "g5.xlarge", "--dry-run"]
    done = subprocess.run(
        [*command, "--ssh-from", "me"],
        env={**os.environ, "HOME": str(tmp_path), "GPUCTL_CHECKIP": teller.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "your public address (203.0.113.1/32 stands for it)" in done.stderr
    assert "no SSH access" not in done.stderr
    assert teller.asked == 0
