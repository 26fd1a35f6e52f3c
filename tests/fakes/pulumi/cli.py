"""A program that stands in for Pulumi's CLI: it runs the inline program for real and makes what it declares through the
resource plug-ins on PATH (``resource_plugin``), with state, locks, signals and texts of the real one (``pulumi_state``,
``pulumi_engine``; sources: pulumi/pulumi).

Ctrl-C and SIGTERM: what is under way goes on, nothing more is begun; a second one kills the plug-ins. SIGHUP, SIGKILL
and a pipe that nobody reads end it at once, with its lock and its pending operations in the state.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.fakes.pulumi.state import CliError, Place, State, check_passphrase
from tests.paths import ROOT

VERSION = "v3.200.0"
"""The last that writes its events to a file is 3.205."""
_TICK_S = 0.5
_STACK = "pulumi:pulumi:Stack"


def real() -> str | None:
    """The real CLI on PATH: tests run on it where there is one."""
    return shutil.which("pulumi")


def install(folder: Path) -> Path:
    """A folder for PATH with ``pulumi`` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "pulumi"
    root = ROOT
    # Its name is among the process's words, as the real one's is: by that gpuctl tells whose engine still lives.
    script = folder / "pulumi-cli.py"
    script.write_text("from tests.fakes.pulumi.cli import run\n\nrun()\n")
    command = f'{shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"'
    program.write_text(f"#!/bin/sh\nPYTHONPATH={shlex.quote(f'{root}/src:{root}')} exec {command}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def main(args: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    words = [word for word in args if not word.startswith("-")]
    if "version" in args or not words:
        print(VERSION)
        return 0
    verb = " ".join(words[:2]) if words[0] in ("stack", "plugin", "config") else words[0]
    try:
        if verb in _CHANGES:
            return _changing(verb, args)
        print(_answer(verb, args, words))
    except CliError as error:
        print(f"error: {error}", file=sys.stderr)
        return 255
    return 0


def _answer(verb: str, args: list[str], words: list[str]) -> str:
    if verb == "plugin ls":
        return "[]"
    if words[0] != "stack" and verb != "cancel":
        return ""
    place = Place(_value(args, "--stack") or words[-1])
    if verb == "stack init":
        Place(words[2]).create()
        return f"Created stack '{words[2]}'"
    if not place.exists():
        raise CliError(f"no stack named '{place.stack}' found")
    if verb == "stack rm":
        place.remove()
        return f"Stack '{place.stack}' has been removed!"
    if verb == "cancel":
        place.cancel()
        return f"The currently running update for '{place.stack}' has been canceled!"
    return json.dumps(_told(verb, place))


def _told(verb: str, place: Place) -> Any:
    if verb == "stack export":
        return {"version": 3, "deployment": place.read()}
    if verb == "stack output":
        stacks = [one for one in place.read().get("resources") or [] if one["type"] == _STACK]
        return stacks[0]["outputs"] if stacks else {}
    if verb == "stack history":
        about = {"message": "", "environment": {}, "config": {}, "result": "succeeded"}
        return [{"kind": "update", "startTime": "2026-11-21T18:00:00.000Z", **about}]
    return None


# -- verbs that change a stack -----------------------------------------------------------------------------------------


def _changing(verb: str, args: list[str]) -> int:
    place = Place(_value(args, "--stack"))
    if not place.exists():
        raise CliError(f"no stack named '{place.stack}' found")
    check_passphrase(place.stack)
    if verb == "preview":
        return _Change(verb, args, State(place)).run()
    with place.locked():
        return _Change(verb, args, State(place)).run()


class _Change:
    """In a thread of its own, while this one listens for signals."""

    def __init__(self, verb: str, args: list[str], state: State) -> None:
        # Most calls of the CLI change nothing, and Pulumi takes a second to import.
        from tests.fakes.pulumi.engine import Deployment, Plugins
        from tests.fakes.pulumi.events import Events

        self._verb = verb
        self._args = args
        self._state = state
        self._events = Events(_value(args, "--event-log"))
        self._plugins = Plugins()
        stack, preview = _value(args, "--stack"), verb == "preview"
        self.deployment = Deployment(stack, state, self._events, self._plugins, preview=preview)
        self._asked_to_end: list[int] = []

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _: self._asked_to_end.append(got))
        ended: list[str] = []
        worker = threading.Thread(target=lambda: ended.append(self._ended()), daemon=True)
        worker.start()
        told = 0.0
        while worker.is_alive() and len(self._asked_to_end) < 2:
            worker.join(0.05)
            if self._asked_to_end and not self.deployment.stop.is_set():
                self._cancel()
            if time.monotonic() > told + _TICK_S:
                told = time.monotonic()
                print("@ updating....", flush=True)
        return self._over(ended[0] if ended else None)

    def _cancel(self) -> None:
        print("^C received; cancelling. If you would like to terminate immediately, press ^C again.", flush=True)
        self.deployment.stop.set()
        self._plugins.cancel()

    def _over(self, why: str | None) -> int:
        """``why`` it failed; ``None``: it has not ended yet, and is ended."""
        if why is None:
            self._state.close()
        if why:
            self._events.said("error", f"{why}\n")
            print(f"Diagnostics:\n  {_STACK}:\n    error: {why}", flush=True)
        self._plugins.kill()
        self._events.end()
        if why is None:
            raise CliError(f"{_WORDS[self._verb]} cancelled")
        return 255 if why else 0

    def _ended(self) -> str:
        """Why it failed; empty: it did not."""
        try:
            _CHANGES[self._verb](self)
        except CliError as error:
            return str(error)
        if self.deployment.failed:
            return f"{_WORDS.get(self._verb, 'update')} failed" if self._verb == "preview" else "update failed"
        return ""

    def up(self) -> None:
        from tests.fakes.pulumi.monitor import run

        self._warn()
        deployment = self.deployment
        said = run(_value(self._args, "--client"), deployment, preview=self._verb == "preview")
        deployment.finish_steps()
        if deployment.stop.is_set() and not deployment.failed:
            raise CliError("update canceled")
        if said and not deployment.failed:
            raise CliError(said)
        if not deployment.failed and self._verb == "up":
            deployment.take_away(deployment.declared)

    def destroy(self) -> None:
        """Cancelled half-way it ends well, and leaves the rest: the program to run is empty, and it has run."""
        self._warn()
        self.deployment.take_away()

    def refresh(self) -> None:
        if "--clear-pending-creates" in self._args:
            self._state.clear_pending_creates()
        self.deployment.refresh()
        if self.deployment.stop.is_set():
            raise CliError("update canceled")

    def _warn(self) -> None:
        pending = self._state.interrupted
        if pending and self._verb != "preview":
            places = "".join(f"  * {one['resource']['urn']}, interrupted while {one['type']}\n" for one in pending)
            head = f"Attempting to deploy or update resources with {len(pending)} pending operations from previous"
            self._events.said("warning", f"{head} deployment.\n{places}")


_CHANGES: dict[str, Callable[[_Change], None]] = {
    "up": _Change.up,
    "preview": _Change.up,
    "destroy": _Change.destroy,
    "refresh": _Change.refresh,
}
_WORDS = {"up": "update", "preview": "preview", "destroy": "destroy", "refresh": "refresh"}


def _value(args: list[str], flag: str) -> str:
    """Of ``--flag value`` or ``--flag=value``."""
    for number, arg in enumerate(args):
        if arg == flag and number + 1 < len(args):
            return args[number + 1]
        if arg.startswith(f"{flag}="):
            return arg.partition("=")[2]
    return ""


def run() -> NoReturn:
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of gRPC would be waited for
