"""Direct questions between agents. The bucket decides; these only make it quick.

Rank 0 keeps one connection to every other agent. Both ends say something regularly, so each learns of the other's

- death: the kernel closes the connection at once, and the port refuses a new one (``gone``);
- silence: a machine that lost power or network closes nothing, but says nothing either (``silent``).

The same connection carries a *poke*: "there is something new in the bucket, look now".

What is said (see ``peer_line`` for how): the caller says who it is and whom it calls, the other end ``ok`` or ``no``
(it is another life), and from then on both say ``.`` (I am here) or ``poke``, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from gpuctl.cluster.clock import Clock
from gpuctl.cluster.membership.failure_detector import PeerState
from gpuctl.cluster.membership.peer_line import LINE_LIMIT, NO_PROOF, PeerLine
from gpuctl.cluster.records.nodes import NodeRecord

Life = tuple[str, str]
"""(node, incarnation)"""

_WORDS_PER_SILENCE = 4
"""A word that is late, or two, are no silence yet."""
_DIAL_S = 1.0
_ASK_AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.4)


@dataclass(slots=True)
class _Peer:
    address: str
    port: int
    sign: PeerState = "unknown"
    heard_at: float = 0.0
    line: PeerLine | None = None
    task: asyncio.Task[None] | None = None


class Peers:
    """An agent's direct contact with the others: a ``PeerEvidence`` on an event loop in a thread of its own.

    ``on_news`` is called, from that thread, when a peer died, fell silent, answered for the first time, or poked.
    """

    def __init__(self, clock: Clock, *, token: str, silent_s: float, on_news: Callable[[], None]) -> None:
        self._clock = clock
        self._token = token
        self._silent_s = silent_s
        self._on_news = on_news
        self._peers: dict[Life, _Peer] = {}
        self._attended: set[Life] = set()
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        """Kept here, since ``asyncio.all_tasks`` misses some where several loops run in a process (before 3.12)."""
        self._me: NodeRecord | None = None
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="peers", daemon=True)

    def start(self, address: str) -> int:
        """Listen on ``address``, on a port the kernel chooses; returns it."""
        self._thread.start()
        port: int = self._run(self._listen(address))
        return port

    def introduce(self, me: NodeRecord) -> None:
        """Who this agent is, once it knows its port."""
        self._me = me
        self._loop.call_soon_threadsafe(self._spawn, self._speak_regularly())

    def stop(self) -> None:
        """Close everything; whoever was connected learns of it at once."""

        async def close() -> None:
            self._stopped = True
            if self._server:
                self._server.close()
            for peer in self._peers.values():
                if peer.line is not None:
                    peer.line.close()
            # More than once: Python 3.11's ``wait_for`` swallows a cancellation that comes as it ends.
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks, timeout=0.1)

        with contextlib.suppress(TimeoutError, RuntimeError):
            self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2)
        if not self._thread.is_alive():
            self._loop.close()

    def of(self, node: str, incarnation: str) -> PeerState:
        peer = self._peers.get((node, incarnation))
        if peer is None:
            return "unknown"
        if peer.sign == "up" and self._clock.monotonic() - peer.heard_at > self._silent_s:
            return "silent"
        return peer.sign

    def attend(self, records: Iterable[NodeRecord]) -> None:
        wanted = {(r.node, r.incarnation): (r.address, r.port) for r in records}
        self._loop.call_soon_threadsafe(self._attend, wanted)

    def poke(self) -> None:
        """Tell everybody connected (from rank 0: all; from another: rank 0) that there is something new to read."""
        self._loop.call_soon_threadsafe(self._say, "poke")

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=5)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._kept(self._loop.create_task(coroutine))

    def _kept(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self, address: str) -> int:
        self._server = await asyncio.start_server(self._accept, address, 0, limit=LINE_LIMIT)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def _attend(self, wanted: dict[Life, tuple[str, int]]) -> None:
        if self._stopped:
            return
        self._attended = set(wanted)
        for life, (address, port) in wanted.items():
            peer = self._peers.setdefault(life, _Peer(address, port))
            if peer.line is None and peer.task is None:
                peer.task = self._spawn(self._dial(life, peer))
        for life in [life for life, peer in self._peers.items() if peer.line is None and peer.task is None]:
            if life not in wanted and self._peers[life].sign != "gone":
                del self._peers[life]

    async def _dial(self, life: Life, peer: _Peer) -> None:
        """Connect, introduce ourselves, and listen until the connection ends; then look why it did."""
        try:
            line = await self._connect(life, peer)
        finally:
            peer.task = None
        if line:
            await self._listen_to(life, peer, line)

    async def _connect(self, life: Life, peer: _Peer) -> PeerLine | None:
        assert self._me is not None
        try:
            opening = asyncio.open_connection(peer.address, peer.port, limit=LINE_LIMIT)
            reader, writer = await asyncio.wait_for(opening, _DIAL_S)
        except ConnectionRefusedError:
            self._note(peer, "gone")
            return None
        except (TimeoutError, OSError):
            return None
        line, me = PeerLine(reader, writer, calls=True), self._me
        hello = {"node": me.node, "incarnation": me.incarnation, "address": me.address, "port": me.port, "to": life}

        async def introduce() -> str:
            await line.begin(self._token)
            line.say(json.dumps(hello))
            return await line.hear()

        answer = ""
        with contextlib.suppress(*NO_PROOF):
            answer = await asyncio.wait_for(introduce(), _DIAL_S)
        if answer == "ok":
            return line
        line.close()
        if answer == "no":
            self._note(peer, "gone")  # another life answers at this port
        return None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._kept(task)
        line, me = PeerLine(reader, writer, calls=False), self._me

        async def met() -> tuple[Life, Life, str, int]:
            await line.begin(self._token)
            hello = json.loads(await line.hear())
            life, to = (str(hello["node"]), str(hello["incarnation"])), tuple(hello["to"])
            return life, to, str(hello["address"]), int(hello["port"])

        try:
            life, to, address, port = await asyncio.wait_for(met(), _DIAL_S)
        except NO_PROOF:
            line.close()
            return
        if me is None or to != (me.node, me.incarnation):
            line.say("no")
            line.close()
            return
        line.say("ok")
        peer = self._peers.setdefault(life, _Peer(address, port))
        with contextlib.suppress(asyncio.CancelledError):  # by ``stop``; asyncio's streams would complain of it
            await self._listen_to(life, peer, line)

    async def _listen_to(self, life: Life, peer: _Peer, line: PeerLine) -> None:
        peer.line = line
        peer.heard_at = self._clock.monotonic()
        self._note(peer, "up")
        try:
            while word := await line.hear():
                peer.heard_at = self._clock.monotonic()
                if word == "poke":
                    self._on_news()
        except NO_PROOF:
            pass
        finally:
            line.close()
        if peer.line is line:
            peer.line = None
            peer.sign = "unknown"
            if peer.task is None and not self._stopped:
                peer.task = self._spawn(self._ask_why(life, peer))

    async def _ask_why(self, life: Life, peer: _Peer) -> None:
        """The connection broke: if the port refuses another one, the process is gone.

        A process that is just dying may still take one, so it is asked more than once.
        """
        for pause_s in _ASK_AGAIN_S:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(peer.address, peer.port), _DIAL_S)
                writer.close()
            except ConnectionRefusedError:
                self._note(peer, "gone")
                break
            except (TimeoutError, OSError):
                break
            await asyncio.sleep(pause_s)
            if peer.line is not None:
                break  # it has come back by itself
        peer.task = None
        if peer.sign != "gone" and peer.line is None and life in self._attended and not self._stopped:
            peer.task = self._spawn(self._dial(life, peer))

    def _note(self, peer: _Peer, sign: PeerState) -> None:
        if peer.sign != sign:
            peer.sign = sign
            self._on_news()

    def _say(self, word: str) -> None:
        for peer in self._peers.values():
            if peer.line is not None:
                with contextlib.suppress(OSError):
                    peer.line.say(word)

    async def _speak_regularly(self) -> None:
        silent: set[Life] = set()
        while True:
            self._say(".")
            await asyncio.sleep(self._silent_s / _WORDS_PER_SILENCE)
            known, silent = silent, {life for life in self._peers if self.of(*life) == "silent"}
            if silent - known:
                self._on_news()
