"""The first process of a job's container: it starts the launcher there, which is torchrun as a rule, and ends
everything when the agent goes away.

It runs in the image's Python, which knows nothing of gpuctl: the standard library only, from Python 3.8 on, and this
file is started by its path. The launcher is a child of it; the agent sees both from outside, and signals the workers
as it would its own.

It talks to the agent over a Unix socket in a folder that both see, one JSON line each:

- in: ``{"args": […], "env": {…}, "library_path": […], "library": …, "fabric": …}``: torchrun's arguments; variables,
  which so stand on no command line and in no ``inspect``; folders with the fabric's libraries; a folder with gpuctl's
  source, for images that have what it needs but not gpuctl itself; and a fabric that NCCL must be able to use. With
  ``launcher``, ``world`` and ``log_dir``, another launcher is started, and ``args`` are the script's (see
  ``process_group``)
- out: ``{"event": "started"}``, then ``{"failures": [{"local_rank": …, "exit_code": …}]}``, or ``{"error": …}`` where
  torchrun itself failed

The socket is also the dead man's handle: its other end is held by the agent alone, and once that is closed this process
leaves, which for the first one of a container ends all the others, whoever else lives on outside.
"""

from __future__ import annotations

import json
import os
import pwd
import select
import signal
import socket
import sys
import traceback
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

SOCKET = "agent.sock"
"""In the folder that is this program's one argument."""
_KILLED = 137
_GPUCTL_NEEDS = ("msgspec", "numpy", "obstore", "xxhash")
_GPUCTL_PYTHON = (3, 11)


def main(folder: str) -> None:
    """Serve the agent that listens in ``folder``, until torchrun or the agent has ended."""
    agent = _connect(folder)
    line = _read_line(agent)
    child = os.fork()
    if child == 0:
        os._exit(_launch(json.loads(line), agent, folder))
    agent.sendall(_line(event="started"))
    _outlive(child, agent)


def _connect(folder: str) -> socket.socket:
    """Through the folder's descriptor, since a socket's path may have 107 bytes and no more."""
    agent = socket.socket(socket.AF_UNIX)
    opened = os.open(folder, os.O_RDONLY)
    agent.connect(f"/proc/self/fd/{opened}/{SOCKET}")
    os.close(opened)
    return agent


def _outlive(child: int, agent: socket.socket) -> None:
    """Wait for the child, reap whatever else ends here, and leave with the agent."""
    ended, waker = socket.socketpair()
    for end in (ended, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == child:
                os._exit(_KILLED if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
            if pid == 0:
                break
        readable, _, _ = select.select([agent, ended], [], [])
        if agent in readable:  # it has nothing more to say, so this is its end
            os._exit(_KILLED)
        ended.recv(4096)


def _launch(order: dict[str, Any], agent: socket.socket, folder: str) -> int:
    os.environ.update(order["env"])
    _search_last(order["library_path"])
    _have_a_home()
    _offer_gpuctl(order["library"])
    if not order["launcher"]:
        _see_to_the_end(order["library"])
    try:
        if order["fabric"]:
            _require(order["fabric"], order["library"], f"{folder}/lib")
        if order["launcher"]:
            said: dict[str, Any] = {"failures": _failures_in_group(order)}
        else:
            said = {"failures": _failures_of(_with_one_output(order["args"]))}
    except (_NoFabric, _Unable) as error:
        said = {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - the process ends here, and should say why
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    agent.sendall(_line(**said))
    return 1 if said.get("failures") or "error" in said else 0


def _failures_of(args: list[str]) -> list[dict[str, int]]:
    """What the ``torchrun`` command does, but telling how each worker ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(args)
    except ChildFailedError as error:
        return [
            {"local_rank": f.local_rank, "exit_code": 128 - f.exitcode if f.exitcode < 0 else f.exitcode}
            for f in error.failures.values()
        ]
    return []


def _failures_in_group(order: dict[str, Any]) -> list[dict[str, int]]:
    """Raises ``_Unable`` if nothing can be started in this image."""
    # An image has no gpuctl as a rule; what is used of it needs nothing else.
    sys.path.append(order["library"])
    from gpuctl.trainers.launchers import process_group
    from gpuctl.trainers.launchers.adapter import World, named

    world: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in order["world"].items()
    }
    try:
        failures = process_group.run(
            named(order["launcher"]), World(**world), order["args"], os.environ, Path(order["log_dir"])
        )
    except process_group.Unable as error:
        raise _Unable(str(error)) from error
    return [{"local_rank": one.local_rank, "exit_code": one.exit_code} for one in failures]


class _Unable(Exception):
    """What the launcher needs is not in this image."""


def _with_one_output(args: list[str]) -> list[str]:
    """Have the script's stderr go where its stdout does: of two files nobody could tell what was written first."""
    script = args.index("--redirects") + 2
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return [*args[:script], "--no-python", "sh", "-c", 'exec "$0" -u "$@" 2>&1', python, *args[script:]]


class _NoFabric(Exception):
    """The fabric is missing, so NCCL would use TCP."""


def _require(fabric: str, library: str, folder: str) -> None:
    """Raises ``_NoFabric``. May put a link into ``folder``, to be searched for libraries."""
    path = f"{library}/gpuctl/trainers/diagnostics/net_plugin.py"
    found = spec_from_file_location("net_plugin", path)
    assert found is not None and found.loader is not None
    net_plugin = module_from_spec(found)
    found.loader.exec_module(net_plugin)
    told = net_plugin.told([sys.executable, path, fabric, folder], os.environ)
    if told["missing"]:
        raise _NoFabric(net_plugin.complaint(fabric, told["missing"], "in this image"))
    _search_last(told["library_path"])


def _search_last(folders: list[str]) -> None:
    """Let what is started from here search a folder for libraries last: the image's own come first, which go with its
    other programs."""
    path = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if folders:
        os.environ["LD_LIBRARY_PATH"] = ":".join([*path, *(folder for folder in folders if folder not in path)])


def _have_a_home() -> None:
    """A user that the image does not know has neither a name nor a folder, and torch's caches want both."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", "gpuctl")
        os.environ.setdefault("LOGNAME", "gpuctl")
    if not os.access(os.environ.get("HOME", ""), os.W_OK):
        os.environ["HOME"] = "/tmp"


def _offer_gpuctl(library: str) -> None:
    if sys.version_info >= _GPUCTL_PYTHON and find_spec("gpuctl") is None and all(map(find_spec, _GPUCTL_NEEDS)):
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = library + (os.pathsep + before if before else "")


def _see_to_the_end(library: str) -> None:
    """Have the workers' interpreters import our ``sitecustomize`` (see ``gloo_exit``)."""
    before = os.environ.get("PYTHONPATH")
    site = f"{library}/gpuctl/trainers/launchers/worker_site"
    os.environ["PYTHONPATH"] = site + (os.pathsep + before if before else "")


def _read_line(agent: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        more = agent.recv(65536)
        if not more:
            os._exit(_KILLED)
        line += more
    return line


def _line(**content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


if __name__ == "__main__":
    # Its own folder comes first otherwise, and has modules with the names of others.
    sys.path.pop(0)
    main(sys.argv[1])
