"""The warm interpreters of a node: the node's own, and one inside each environment that a job waits for or runs in.

What an interpreter has imported cannot be replaced by another version, so an environment gets one that began in it. One
takes some 300 MB: those that no unfinished job needs end, and a job far back in line gets its own when its turn comes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from gpuctl.bootstrap.environments.disk import NodeEnvironment
from gpuctl.bootstrap.launch.interpreter import Interpreter

_AHEAD = 3
"""So many may be there for jobs that do not run yet."""
_LAUNCH_S = 60.0
OWN = ""
"""Key of the node's own; those of environments have their digests."""


class Interpreters:
    """Starts and keeps them. Thread-safe.

    Args:
        env: variables of each.
        folder: holds their logs.
        on_change: is called when one became ready, failed, or finished preloading.
    """

    def __init__(self, env: Mapping[str, str], folder: Path, on_change: Callable[[], None]) -> None:
        self._env = dict(env)
        self._folder = folder
        self._on_change = on_change
        self._lock = threading.Lock()
        self._running: dict[str, Interpreter] = {}
        self._taken_at: dict[str, float] = {}

    @property
    def is_ready(self) -> bool:
        """Whether all that are there are warm, with nothing left to preload, and there is one."""
        with self._lock:
            return bool(self._running) and all(one.is_ready for one in self._running.values())

    def take(self, environment: NodeEnvironment | None) -> Interpreter:
        """The same, for workers that are about to be launched: it stays for as long as that may take."""
        with self._lock:
            self._taken_at[key_of(environment)] = time.monotonic()
        return self.of(environment)

    def warm(self) -> list[str]:
        """Keys of those that are warm, with nothing left to preload."""
        with self._lock:
            return [key for key, one in self._running.items() if one.is_ready]

    def of(self, environment: NodeEnvironment | None) -> Interpreter:
        """The interpreter inside ``environment``, or the node's own; started if there is none."""
        key = key_of(environment)
        with self._lock:
            if key not in self._running:
                env = self._env if environment is None else environment.variables(self._env)
                python = None if environment is None else environment.python
                log = self._folder / "interpreter.log"
                self._running[key] = Interpreter(env, log, self._on_change, python)
            return self._running[key]

    def preload(self, environment: NodeEnvironment | None, names: Collection[str]) -> None:
        """Have one import ``names``, unless there are many already."""
        with self._lock:
            many = key_of(environment) not in self._running and len(self._running) >= _AHEAD
        if not many:
            self.of(environment).preload(names)

    def keep(self, wanted: Collection[str] | None) -> None:
        """Start again what has died; end what has no workers and is not ``wanted`` (keys), which is ``None`` while
        nobody knows what comes next."""
        with self._lock:
            gone = set() if wanted is None else self._running.keys() - set(wanted)
            ended = [self._running.pop(key) for key in gone if self._running[key].is_idle and not self._is_taken(key)]
            running = list(self._running.values())
        for one in ended:
            one.stop()
        for one in running:
            one.keep()

    def _is_taken(self, key: str) -> bool:
        return time.monotonic() - self._taken_at.get(key, -math.inf) < _LAUNCH_S

    def stop(self) -> None:
        """End all of them, and all that was started from them."""
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for one in running:
            one.stop()


def key_of(environment: NodeEnvironment | None) -> str:
    """By which an interpreter is known."""
    return OWN if environment is None else environment.environment.digest
