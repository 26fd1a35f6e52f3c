"""Build a container image on this node: ``python -m gpuctl.bootstrap.containers.build NODE_FOLDER``.

What to build comes as a ``BuildOrder`` in the first line of standard input. What Docker or Podman print goes to
standard error. The build ends when standard input does: that is the connection of whoever asked for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from gpuctl.bootstrap.containers import bucket_images, saved_image
from gpuctl.bootstrap.containers.client import ContainerClient
from gpuctl.bootstrap.containers.command_lines import ContainerRuntime, build_command, full_name, save_command
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.environments import images
from gpuctl.cluster.errors import Fenced, GpuctlError
from gpuctl.cluster.jobs.code_archive import unpack
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

_END_S = 3.0
"""Less than whoever asked for the build waits for its end."""
_SCRATCH = "image-build-"
"""What the names of folders begin with, in the node's, that hold a build's files. Then comes its pid."""
_GIVEN_UP = "error: the build was given up; run it again"
_NODE_IS_NEEDED = "see `gpuctl status`, or build on another node"


class BuildOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An image to build."""

    code: str
    """Digest of the packed folder with the Dockerfile."""
    dockerfile: str
    """Its path in there."""
    name: str = ""
    """For the image in the bucket; empty: it is pushed instead."""
    push: str = ""
    """Where to: a registry's name for it."""
    options: tuple[str, ...] = ()
    """Further ones of ``docker build``."""


class ImageBuild:
    """One build on one node.

    Args:
        identity: the node's.
        store: the cluster's bucket.
        order: what to build.
        over: set once nobody waits for it any more.
    """

    def __init__(self, identity: NodeIdentity, store: Bucket, order: BuildOrder, over: threading.Event) -> None:
        self._node = identity.node
        self._store = store
        self._order = order
        self._over = over
        self._client = ContainerClient(os.environ)

    def run(self, folder: Path) -> None:
        """Build it, with ``folder`` for what lies on the disk meanwhile.

        Raises ``GpuctlError`` for a build that fails or is given up, and as the bucket does.
        """
        runtime = self._client.find()
        context = folder / "context"
        code = self._store.get(layout.code(self._order.code))
        if code is None:
            raise GpuctlError("the folder is not in the bucket any more", "run it again")
        unpack(code, context, self._order.code)
        temporary = f"{images.REPOSITORY}/{self._order.name or 'pushed'}:building-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._client.env["TMPDIR"] = str(folder)  # what Podman leaves there if it is ended goes with it
        try:
            self._do(build_command(runtime, temporary, context, self._order.dockerfile, self._order.options), "build")
            if self._order.push:
                self._push(runtime, temporary)
            else:
                self._keep(runtime, temporary, folder / "image.tar")
        finally:
            self._client.ask([runtime.program, "rmi", temporary])  # a name less: the image has another by now

    def _push(self, runtime: ContainerRuntime, built: str) -> None:
        name = full_name(self._order.push)
        self._do([runtime.program, "tag", built, name], "tag")
        try:
            self._do([runtime.program, "push", name], "push")
        finally:
            self._client.ask([runtime.program, "rmi", name])

    def _keep(self, runtime: ContainerRuntime, built: str, archive: Path) -> None:
        self._do(save_command(runtime, built, archive), "save")
        with saved_image.opened(archive) as saved:
            image = bucket_images.upload(self._store, saved, self._order.name, self._node, self._over.is_set, _say)
        pinned = f"{images.IN_BUCKET}{image.name}{images.AT}{image.digest}"
        own = images.local_name(pinned)
        self._do([runtime.program, "tag", built, own], "tag")
        self._remove(runtime, own.rpartition(":")[0], lambda name: name != own)

    def _remove(self, runtime: ContainerRuntime, repository: str, is_old: Callable[[str], bool]) -> None:
        """Remove images that are called so on this node. One that a container has stays."""
        command = [runtime.program, "images", "--format", "{{.Repository}}:{{.Tag}}", repository]
        for name in filter(is_old, self._client.ask(command).stdout.split()):
            self._client.ask([runtime.program, "rmi", name])

    def remove_left_over(self) -> None:
        """Images of builds that were killed."""
        self._remove(self._client.find(), f"{images.REPOSITORY}/*", _is_left_over)

    def _do(self, command: Sequence[str], what: str) -> None:
        """Run it to its end, or to that of ``over``."""
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=self._client.env, start_new_session=True
            )
        except OSError as error:
            raise GpuctlError(f"cannot run {command[0]}: {error.strerror}", _NODE_IS_NEEDED) from error
        try:
            while process.poll() is None and not self._over.is_set():
                self._over.wait(0.1)
        finally:
            _end(process)
        if self._over.is_set():
            raise Fenced("nobody waits for the build")
        if process.returncode:
            raise GpuctlError(f"the {what} failed on {self._node} (exit {process.returncode})", "see above")


def _end(process: subprocess.Popen[bytes]) -> None:
    """What it runs first: Podman then removes the container of that step, and both would outlive it."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    if not below:
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remove_left_over(folder: Path) -> None:
    """What builds that were killed have left in the node's ``folder``."""
    for path in folder.glob(f"{_SCRATCH}*"):
        pid = path.name.removeprefix(_SCRATCH).partition("-")[0]
        if not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_left_over(name: str) -> bool:
    found = re.search(r":building-(\d+)-", name)
    return found is not None and not psutil.pid_exists(int(found[1]))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _watch_stdin(over: threading.Event) -> None:
    while os.read(0, 1 << 16):
        pass
    over.set()


def main(folder: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked for it, and ends standard input
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        order = msgspec.json.decode(_first_line(), type=BuildOrder)
        identity = NodeIdentity.read(Path(folder))
        os.environ.update(identity.env)  # the keys to the bucket, where the machine has no identity of its own
        threading.Thread(target=_watch_stdin, args=(over,), daemon=True).start()
        _remove_left_over(Path(folder))
        build = ImageBuild(identity, open_bucket(identity.bucket), order, over)
        build.remove_left_over()
        with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-", dir=folder) as scratch:
            build.run(Path(scratch))
    except Fenced:
        print(_GIVEN_UP, file=sys.stderr)
        return 1
    except GpuctlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or folder}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _first_line() -> bytes:
    """Without what follows: that is for ``_watch_stdin``."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
