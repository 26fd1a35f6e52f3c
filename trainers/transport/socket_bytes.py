"""What the TCP sockets of this process have carried: gloo's, NCCL's, a bucket's and our own alike.

The kernel counts for each socket (``TCP_INFO``, see tcp(7) and ``struct tcp_info`` in ``linux/tcp.h``), and tells a
socket's own process without any privilege. So nothing is hooked or wrapped, and no library has to be asked. What does
not go through TCP is not seen: shared memory, Unix sockets, RDMA, NVLink.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from gpuctl.cluster.errors import GpuctlError

_SO_COOKIE = 57
"""A number that the kernel gives to one socket and never again. An inode's number may come back."""
_RECEIVED_AT = 128
"""Offset of ``tcpi_bytes_received``, u64, in ``struct tcp_info``."""
_SENT_AT = 200
"""Offset of ``tcpi_bytes_sent`` and, after it, ``tcpi_bytes_retrans``, u64 each: there since Linux 4.19."""
_INFO_BYTES = _SENT_AT + 16
_Answer = ctypes.Array[ctypes.c_char] | ctypes.c_uint64


@dataclass(frozen=True)
class Traffic:
    """Bytes of payload: without the headers of TCP, IP and Ethernet, which add about 4.5 % at an MTU of 1500."""

    sent: int = 0
    """Handed to the network, each byte once. What still waits in a socket's buffer is not among them."""
    received: int = 0
    """Arrived in order, read or not. The kernel counts the end of a stream as one byte more."""
    retransmitted: int = 0
    """Sent again because they seemed lost, each time; not part of ``sent``."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received, self.retransmitted + other.retransmitted)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received, self.retransmitted - other.retransmitted)


class SocketBytes:
    """The traffic of all TCP sockets of this process::

        socket_bytes = SocketBytes()
        before = socket_bytes.read()
        dist.all_reduce(gradients)
        print((socket_bytes.read() - before).sent)

    A socket that has been closed counts with what it had carried at the last ``read``, so read before a process group
    is dropped; one that opened and closed between two reads is missed. A connection of this process to itself counts
    at both ends, and a socket that a child process shares counts in both processes. Not for several threads at once.

    Raises ``GpuctlError`` anywhere but on Linux 4.19 or newer.
    """

    def __init__(self) -> None:
        self._open: dict[int, Traffic] = {}
        """What each socket had carried when it was last seen open, by the kernel's cookie."""
        self._closed = Traffic()
        self._kernel = _Kernel()

    def read(self) -> Traffic:
        """Totals of all sockets that a ``read`` has seen, each since it was opened. Takes 0.3 ms for 50 sockets."""
        found = self._kernel.sockets()
        for cookie in self._open.keys() - found.keys():
            self._closed += self._open[cookie]
        self._open = found
        return sum(found.values(), self._closed)


class _Kernel:
    """Asks by file descriptor. A ``socket.socket`` of one would close it for its owner when it is collected."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise GpuctlError(f"the traffic of sockets is counted on Linux only, and this is {sys.platform}")
        # PyDLL, which keeps the interpreter's lock: a call takes a microsecond, and to get the lock back from a busy
        # thread takes 5 ms each time.
        self._getsockopt = ctypes.PyDLL(None).getsockopt
        self._info = ctypes.create_string_buffer(_INFO_BYTES)
        self._cookie = ctypes.c_uint64()
        with socket.socket() as unused:
            if self._traffic(unused.fileno()) is None:
                raise GpuctlError("this kernel does not count what a socket has sent", "Linux 4.19 and newer do")

    def sockets(self) -> dict[int, Traffic]:
        """All TCP sockets that are open now, by cookie."""
        found = {}
        for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            cookie = self._cookie_of(descriptor)
            traffic = self._traffic(descriptor) if cookie else None
            # Another thread may have closed it in between, and the next socket has its number.
            if traffic is not None and cookie == self._cookie_of(descriptor):
                found[cookie] = traffic
        return found

    def _cookie_of(self, descriptor: int) -> int:
        """0 for what is no socket."""
        return self._cookie.value if self._ask(descriptor, socket.SOL_SOCKET, _SO_COOKIE, self._cookie) else 0

    def _traffic(self, descriptor: int) -> Traffic | None:
        """None for what is no TCP socket."""
        if not self._ask(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, self._info):
            return None
        (received,) = struct.unpack_from("=Q", self._info, _RECEIVED_AT)
        sent, retransmitted = struct.unpack_from("=QQ", self._info, _SENT_AT)
        return Traffic(sent - retransmitted, received, retransmitted)

    def _ask(
        self, descriptor: int, level: int, option: int, answer: ctypes.Array[ctypes.c_char] | ctypes.c_uint64
    ) -> bool:
        """Whether the whole of ``answer`` was filled."""
        size = ctypes.c_uint32(ctypes.sizeof(answer))
        refused = self._getsockopt(descriptor, level, option, ctypes.byref(answer), ctypes.byref(size))
        return not refused and size.value == ctypes.sizeof(answer)
