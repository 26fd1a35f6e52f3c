"""How a node's GPUs are while jobs run on them: what ``gpu_watch`` says, in a process of its own that may hang."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

_SILENT_S = 60.0
"""A driver that stays loaded answers in milliseconds; one that does not takes 3 s for each GPU."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


class GpuHealth:
    """Watches the node's GPUs on a thread, from ``start`` to ``stop``; nothing on a node without.

    Args:
        env: the environment in which the driver's library is found.
        devices: the GPUs, as ``nvidia-smi -L`` names them.
        on_change: called from the thread when something is new.
        say: for the node's log.
        silent_s: after so long without a word the driver is taken for one that hangs.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        devices: Sequence[str],
        on_change: Callable[[], None],
        say: Callable[[str], None],
        silent_s: float = _SILENT_S,
    ) -> None:
        self.ill = ""
        """What is wrong with a GPU that no job may use any more. It stays so."""
        self.warning = ""
        """What is to be told of a GPU that is well enough."""
        self._gpus = [found[1] for device in devices if (found := re.match(r"GPU (\d+):", device))]
        self._env = dict(env)
        self._on_change = on_change
        self._say = say
        self._silent_s = silent_s
        self._stopped = threading.Event()
        self._news = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._gpus:
            threading.Thread(target=self._watch, name="gpu-health", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._process:
            self._process.kill()

    def settle(self, seconds: float) -> str:
        """What is ill, after a failure: a driver tells of an error a moment after the program that it ends. Waits at
        most so long, and not at all on a node without GPUs."""
        with self._news:
            if self._process and not self.ill:
                self._news.wait_for(lambda: bool(self.ill), seconds)
            return self.ill

    def _watch(self) -> None:
        """In a thread that stays: the process asks to die with its parent, and to the kernel that is this thread."""
        for tries in range(sys.maxsize):
            if self._stopped.is_set() or not self._listen() or self.ill:
                return
            if tries == 0:
                self._say("the watch of the GPUs has ended, and begins again")
            self._stopped.wait(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])

    def _listen(self) -> bool:
        """To one process until its end. Returns whether another one may do better."""
        command = [sys.executable, "-m", "gpuctl.bootstrap.monitors.gpu_watch", *self._gpus]
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._env
        )
        assert process.stdout
        with process.stdout as out:
            rest = b""
            while True:
                if not select.select([out], [], [], self._silent_s)[0]:
                    self._take(f"the NVIDIA driver has not answered for {self._silent_s:g} s", "")
                    process.kill()
                    # Who hangs in the driver hears no kill, so nobody here may wait for its end.
                    threading.Thread(target=process.wait, name="gpu-watch", daemon=True).start()
                    return False
                data = os.read(out.fileno(), 65536)
                if not data:
                    process.wait()
                    return True
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    if "unable" in said:
                        self._say(f"the GPUs are not watched: {said['unable']}")
                        process.wait()
                        self._process = None
                        return False
                    self._take(said["ill"], said["warning"])

    def _take(self, ill: str, warning: str) -> None:
        with self._news:
            before = (self.ill, self.warning)
            self.ill, self.warning = self.ill or ill, warning
            self._news.notify_all()
        if before != (self.ill, self.warning):
            self._on_change()
