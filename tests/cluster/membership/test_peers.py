"""Direct contact between agents: real sockets, real processes, really killed."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.membership.peers import Peers
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.shared_key import Session
from tests.waiting import PATIENCE_S

TALKER = Path(__file__).with_name("talker.py")
SILENT_S = 2.0


class Agent:
    """Our side."""

    def __init__(self, node: str, token: str = "secret") -> None:
        self.news = threading.Event()
        self.peers = Peers(SystemClock(), token=token, silent_s=SILENT_S, on_news=self.news.set)
        port = self.peers.start("127.0.0.1")
        self.record = NodeRecord(node=node, incarnation=f"{node}-life", beat=0, address="127.0.0.1", port=port)
        self.peers.introduce(self.record)

    def sign(self, of: NodeRecord) -> str:
        return self.peers.of(of.node, of.incarnation)

    def wait_for(self, of: NodeRecord, sign: str, within_s: float = 10.0) -> float:
        """Keeps attending, as rank 0 does, until the sign is there; returns the seconds it took."""
        return _until(lambda: self._attended(of) == sign, f"{of.node} to be {sign}", within_s)

    def _attended(self, of: NodeRecord) -> str:
        self.peers.attend([of])
        return self.sign(of)


class Process:
    """Another agent's contact, in a process of its own."""

    def __init__(self, node: str, token: str = "secret", address: str = "127.0.0.1") -> None:
        command = [sys.executable, str(TALKER), address, token, node, f"{node}-life"]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        port = int(self.popen.stdout.readline())
        self.record = NodeRecord(node=node, incarnation=f"{node}-life", beat=0, address=address, port=port)

    def end(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def ours() -> Iterator[Agent]:
    agent = Agent("ours")
    yield agent
    agent.peers.stop()


@pytest.fixture
def other() -> Iterator[Process]:
    process = Process("other")
    yield process
    process.end()


@pytest.mark.timing
def test_a_killed_process_is_gone_within_a_second(ours: Agent, other: Process) -> None:
    ours.wait_for(other.record, "up")
    other.popen.kill()
    assert _until(lambda: ours.sign(other.record) == "gone", "gone", 10) < 1


@pytest.mark.timing
def test_a_frozen_process_is_silent_and_up_again_when_it_wakes(ours: Agent, other: Process) -> None:
    ours.wait_for(other.record, "up")
    other.popen.send_signal(signal.SIGSTOP)
    assert ours.wait_for(other.record, "silent") > SILENT_S / 2
    other.popen.send_signal(signal.SIGCONT)
    ours.wait_for(other.record, "up")


def test_silence_is_news(ours: Agent, other: Process) -> None:
    ours.wait_for(other.record, "up")
    other.popen.send_signal(signal.SIGSTOP)
    ours.news.clear()
    assert ours.news.wait(PATIENCE_S)
    assert ours.sign(other.record) == "silent"


def test_both_ends_of_a_connection_see_each_other() -> None:
    leader, follower = Agent("leader"), Agent("follower")
    leader.wait_for(follower.record, "up")
    _until(lambda: follower.sign(leader.record) == "up", "the follower to see rank 0", 5)
    leader.peers.stop()
    _until(lambda: follower.sign(leader.record) == "gone", "the follower to see rank 0's end", 5)
    follower.peers.stop()


def test_a_poke_wakes_those_connected_in_both_directions() -> None:
    leader, follower = Agent("leader"), Agent("follower")
    try:
        leader.wait_for(follower.record, "up")
        _until(lambda: follower.sign(leader.record) == "up", "both to be connected", 5)
        for talks, hears in ((leader, follower), (follower, leader)):
            hears.news.clear()
            talks.peers.poke()
            assert hears.news.wait(5)
    finally:
        leader.peers.stop()
        follower.peers.stop()


def test_another_life_at_the_same_port_means_that_the_former_is_gone(ours: Agent, other: Process) -> None:
    from msgspec.structs import replace

    former = replace(other.record, incarnation="an earlier life")
    ours.wait_for(former, "gone")
    ours.wait_for(other.record, "up")


def test_who_does_not_know_the_token_is_told_nothing(other: Process) -> None:
    stranger = Agent("stranger", token="wrong")
    try:
        for _ in range(5):
            stranger.peers.attend([other.record])
            stranger.news.wait(0.1)
        assert stranger.sign(other.record) == "unknown"
    finally:
        stranger.peers.stop()


def test_a_node_never_met_is_unknown_and_a_port_that_refuses_is_gone(ours: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nobody = NodeRecord(node="nobody", incarnation="x", beat=0, address="127.0.0.1", port=port)
    assert ours.sign(nobody) == "unknown"
    ours.wait_for(nobody, "gone")


def test_a_machine_that_takes_connections_and_says_nothing_is_dialled_again(ours: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        record = NodeRecord(node="mute", incarnation="x", beat=0, address="127.0.0.1", port=mute.getsockname()[1])
        mute.settimeout(0.1)
        taken: list[socket.socket] = []

        def dialled_again() -> bool:
            ours.peers.attend([record])
            with contextlib.suppress(TimeoutError):
                taken.append(mute.accept()[0])
            return len(taken) > 1

        _until(dialled_again, "a second connection", 20)
        assert ours.sign(record) == "unknown"
        for one in taken:
            one.close()


def test_who_connects_and_says_nothing_is_shown_out(other: Process) -> None:
    with socket.create_connection((other.record.address, other.record.port), timeout=20) as connection:
        assert connection.recv(100) == b""


def test_a_dying_process_that_still_takes_a_connection_is_found_gone(ours: Agent) -> None:
    """By one that does not attend to it, as followers do not to rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as dying:
        life = ("dying", "x")
        hello = {"node": life[0], "incarnation": life[1], "address": "127.0.0.1", "port": dying.getsockname()[1]}
        with Caller(ours.record) as caller:
            caller.say(json.dumps({**hello, "to": (ours.record.node, ours.record.incarnation)}))
            assert caller.hear()[0] == "ok"
        dying.settimeout(20)
        dying.accept()[0].close()  # it is asked why, and still answers
    _until(lambda: ours.peers.of(*life) == "gone", "it to be gone", 20)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"\xff" * 10_000 + b"\n", b"[" * 4000 + b"\n"],
    ids=["nothing", "an empty line", "HTTP", "no nonce", "a list", "no text", "deep"],
)
def test_garbage_at_the_port_does_no_harm(ours: Agent, other: Process, garbage: bytes) -> None:
    with socket.create_connection((other.record.address, other.record.port), timeout=5) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    ours.wait_for(other.record, "up")


class Caller:
    """The other end of a line to an agent, word by word."""

    def __init__(self, to: NodeRecord, token: str = "secret") -> None:
        self.connection = socket.create_connection((to.address, to.port), timeout=20)
        self._file = self.connection.makefile("rb")
        self.write("caller's nonce")
        self.session = Session(token, "caller's nonce", json.loads(self._file.readline()))
        self._said = 0

    def write(self, line: object) -> None:
        self.connection.sendall(json.dumps(line).encode() + b"\n")

    def say(self, word: str) -> list[str]:
        """Returns what went over the wire."""
        self._said += 1
        line = [word, self.session.code("caller", self._said, word)]
        self.write(line)
        return line

    def hear(self) -> list[str]:
        """Empty once the agent has closed the connection."""
        found: list[str] = json.loads(self._file.readline() or b"[]")
        return found

    def closed(self) -> bool:
        """Whether the agent closes the connection, and until then says nothing but that it is there."""
        try:
            while word := self.hear():
                assert word[0] == "."
        except ConnectionError:
            pass
        return True

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.connection.close()


def hello_to(agent: NodeRecord, node: str = "caller") -> str:
    whom = (agent.node, agent.incarnation)
    return json.dumps({"node": node, "incarnation": "x", "address": "127.0.0.1", "port": 1, "to": whom})


def test_the_token_is_never_sent(ours: Agent) -> None:
    """To whoever answers in an agent's place, and not from who is called either."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        record = NodeRecord(node="gone", incarnation="x", beat=0, address="127.0.0.1", port=stranger.getsockname()[1])
        ours.peers.attend([record])
        stranger.settimeout(20)
        connection, _ = stranger.accept()
        with connection, connection.makefile("rb") as file:
            connection.sendall(b'"a nonce"\n')
            heard = file.readline() + file.readline()
            connection.sendall(b'["ok", "00"]\n')
            assert file.readline() == b"", "it hangs up"
    assert b"secret" not in heard
    assert b"ours-life" in heard
    assert ours.sign(record) != "up"
    with Caller(ours.record) as caller:
        caller.say(hello_to(ours.record))
        assert "secret" not in json.dumps(caller.hear())


def test_a_stranger_cannot_say_that_another_life_answers_at_a_port(ours: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        record = NodeRecord(node="there", incarnation="x", beat=0, address="127.0.0.1", port=stranger.getsockname()[1])
        ours.peers.attend([record])
        stranger.settimeout(20)
        connection, _ = stranger.accept()
        with connection, connection.makefile("rb") as file:
            connection.sendall(b'"a nonce"\n["no", "00"]\n')
            assert file.readline()
            assert file.readline()
            assert file.readline() == b""
        assert ours.sign(record) == "unknown"


@pytest.mark.parametrize("forged", ["no code", "of another line", "of the other end", "said twice"])
def test_a_poke_that_is_not_the_callers_own_ends_the_connection(ours: Agent, forged: str) -> None:
    with Caller(ours.record) as caller:
        caller.say(hello_to(ours.record))
        assert caller.hear()[0] == "ok"
        first = caller.say("poke")
        _until(ours.news.is_set, "the first poke", 20)
        ours.news.clear()
        with Caller(ours.record) as other:
            lines = {
                "no code": ["poke", ""],
                "of another line": ["poke", other.session.code("caller", 3, "poke")],
                "of the other end": ["poke", caller.session.code("listener", 3, "poke")],
                "said twice": first,
            }
            caller.write(lines[forged])
            assert caller.closed()


def test_what_was_heard_on_one_connection_opens_no_other(ours: Agent) -> None:
    with Caller(ours.record) as caller:
        heard = caller.say(hello_to(ours.record))
        assert caller.hear()[0] == "ok"
    with Caller(ours.record) as again:  # the same nonce, but the agent's own is a new one
        again.write(heard)
        assert again.hear() == []


def _until(condition: Callable[[], bool], what: str, within_s: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"waited {within_s:g} s for {what}"
        time.sleep(0.02)
    return time.monotonic() - began
