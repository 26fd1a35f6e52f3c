"""Docker or Podman on this node: find it, pull a job's image before a round needs it, and leave no container behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

import gpuctl
from gpuctl.bootstrap.containers import bucket_images
from gpuctl.bootstrap.containers.client import ContainerClient, last_line
from gpuctl.bootstrap.containers.command_lines import (
    FOLDER_LABEL,
    LIBRARY,
    OPTIONS,
    ContainerRuntime,
    ContainerSpec,
    FabricLibraries,
    fabric_libraries,
    found_machine,
    full_name,
    launch_order,
    list_command,
    named_files,
    passed,
    pull_command,
    remove_command,
    run_command,
    scratch_folder,
)
from gpuctl.bootstrap.containers.old_images import PulledImages
from gpuctl.bootstrap.containers.process import ContainerCommand, ContainerRun
from gpuctl.bootstrap.launch.interpreter import Launched, OnExit
from gpuctl.bootstrap.ports import reserved
from gpuctl.cluster.disk import used_share
from gpuctl.cluster.environments import images
from gpuctl.cluster.errors import Fenced, GpuctlError
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.trainers.launchers.adapter import named
from gpuctl.trainers.launchers.torchrun import LaunchSpec

NOTE = "container-runtime.json"
"""In the node's folder once it has run a container: what ran it."""
_LOADING = "image-load-"
"""What the names of folders begin with, in the node's, that Podman writes to while it loads an image."""
_SAY_EVERY_S = 10.0
"""Of what a pull prints."""


class Containers:
    """The node's container runtime, and the image it prepares. Thread-safe. ``on_change`` is called when ``doing`` has
    changed."""

    def __init__(
        self,
        folder: Path,
        store: PartStore,
        node_env: Mapping[str, str],
        env: Mapping[str, str],
        gpus: bool,
        say: Callable[[str], None],
        on_change: Callable[[], None],
        used: Callable[[Path], float] = used_share,
    ) -> None:
        """``store``: may have images; ``node_env``: for the workers of every job here; ``env``: for Docker or Podman
        themselves; ``used``: see ``PulledImages``."""
        self.doing = ""
        """What takes long just now, for people: such as "pulling debian:12"."""
        self._folder = folder
        self._store = store
        self._node_env = dict(node_env)
        self._client = ContainerClient(env)
        self._gpus = gpus
        self._say = say
        self._on_change = on_change
        self._lock = threading.Lock()
        self._runtime: ContainerRuntime | None = None
        self._names: dict[str, str] = {}
        """Images that are here, by what jobs call them."""
        self._pulled = PulledImages(folder / "images.json", say, used)
        self._swept = False
        self._stopped = threading.Event()

    def sweep(self) -> None:
        """Remove what an agent of this node that died has left. Costs nothing where no container has ever run."""
        with self._lock:
            self._sweep()

    def fetch(self, image: str, is_over: Callable[[], bool] = lambda: False) -> None:
        """Have ``image`` here: pull it unless it is. Breaks off when ``is_over``.

        Raises ``GpuctlError`` naming the image and what the registry said, ``Fenced`` if broken off.
        """
        while not self._lock.acquire(timeout=0.1):
            self._check(is_over)
        try:
            self._sweep()
            if not self._has(image):
                self._runtime = self._runtime or self._client.find()
                self._names[image] = self._have(self._runtime, image, is_over)
            self._pulled.use(self._names[image])
        finally:
            self._lock.release()

    def launch(
        self,
        image: str,
        spec: LaunchSpec,
        folder: Path,
        listening: socket.socket | None,
        on_exit: OnExit,
        fabric: str = "",
    ) -> Launched:
        """Start the workers of a round in ``image``, which ``fetch`` has brought; none if there is a ``fabric`` that
        NCCL cannot use in there (see ``net_plugin``).

        ``spec.env`` has what is for the workers, who may write to the job's ``folder``, and nothing of this machine's.
        ``on_exit`` is called from another thread. Raises ``GpuctlError`` for options that cannot be read, ``OSError``
        if nothing could be started, ``Fenced`` if the master's port has been taken.
        """
        assert self._runtime is not None
        runtime = self._runtime
        env = {**passed(self._node_env), **spec.env}
        name = self._names.get(image) or _names_of(image)[-1]
        libraries = self._libraries(runtime, name)
        meeting = Path(spec.log_dir).parent / "container"
        meeting.mkdir(parents=True, exist_ok=True)
        box = ContainerSpec(
            name=f"gpuctl-{spec.run_id}-{uuid.uuid4().hex[:8]}",
            image=name,
            labels={FOLDER_LABEL: str(self._folder), "gpuctl.job": spec.job, "gpuctl.round": str(spec.round)},
            cwd=spec.cwd,
            writable=(str(folder), *scratch_folder(env), *_bucket_folder(env.get("GPUCTL_BUCKET", ""))),
            readable=(*named_files(env), *libraries.mounted),
            library=Path(gpuctl.__file__).parent,
            meeting=str(meeting),
            package=named(spec.launcher).needs,
        )
        machine = found_machine(self._gpus, os.getuid(), os.getgid(), _options(env))
        (self._folder / NOTE).write_bytes(msgspec.json.encode(runtime))
        try:
            held = reserved(listening) if listening else None
        except OSError as error:
            raise Fenced("the port offered for this round is in use") from error
        return ContainerRun(
            run_command(runtime, machine, box),
            remove_command(runtime, [box.name]),
            self._client.env,
            meeting,
            ContainerCommand(
                **launch_order(spec), env=env, library_path=[*libraries.searched], library=LIBRARY, fabric=fabric
            ),
            held,
            on_exit,
        )

    def stop(self) -> None:
        """Break off a pull: this node leaves."""
        self._stopped.set()

    def _sweep(self) -> None:
        """Once, and before there is a container of this agent's own."""
        if self._swept:
            return
        self._swept = True
        for scratch in self._folder.glob(f"{_LOADING}*"):
            shutil.rmtree(scratch, ignore_errors=True)
        try:
            runtime = msgspec.json.decode((self._folder / NOTE).read_bytes(), type=ContainerRuntime)
        except (OSError, msgspec.MsgspecError):
            return
        left = self._client.ask(list_command(runtime, str(self._folder))).stdout.split()
        if left:
            self._say(f"removing {len(left)} containers of an agent that has died")
            self._client.ask(remove_command(runtime, left))

    def _has(self, image: str) -> bool:
        """It was here, and nobody has removed it since."""
        return (
            image in self._names and self._runtime is not None and self._client.has(self._runtime, self._names[image])
        )

    def _have(self, runtime: ContainerRuntime, image: str, is_over: Callable[[], bool]) -> str:
        in_bucket, names = images.is_in_bucket(image), _names_of(image)
        name = next((name for name in names if self._client.has(runtime, name)), None)
        if name is None:
            self._do(f"pulling {images.shown(image)}")
            try:
                self._make_room(runtime)
                (self._load if in_bucket else self._pull)(runtime, image, is_over)
            finally:
                self._do("")
        if in_bucket or name is None:  # one of the bucket's is gpuctl's own, also where it was built
            self._pulled.pulled(names[-1])
        return name or names[-1]

    def _make_room(self, runtime: ContainerRuntime) -> None:
        where = "{{.DockerRootDir}}" if runtime.kind == "docker" else "{{.Store.GraphRoot}}"
        folder = self._client.ask([runtime.program, "info", "--format", where]).stdout.strip()
        if folder:
            gone = self._pulled.make_room(
                Path(folder), lambda name: self._client.ask([runtime.program, "rmi", name]).returncode == 0
            )
            self._names = {image: name for image, name in self._names.items() if name not in gone}

    def _libraries(self, runtime: ContainerRuntime, name: str) -> FabricLibraries:
        library_path = self._node_env.get("LD_LIBRARY_PATH", "")
        if not library_path:
            return FabricLibraries()
        image_env = self._client.ask([runtime.program, "image", "inspect", "--format", "{{.Config.Env}}", name]).stdout
        return fabric_libraries(library_path, image_env)

    def _pull(self, runtime: ContainerRuntime, image: str, is_over: Callable[[], bool]) -> None:
        began = said_at = time.monotonic()
        path = self._folder / "pull.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                pull_command(runtime, image), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._client.env
            )
        self._say(f"pulling {image}")
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                    break
                self._check(is_over)
                if time.monotonic() > said_at + _SAY_EVERY_S:
                    said_at = time.monotonic()
                    self._say(
                        f"pulling {image}: {said_at - began:.0f} s, {last_line(path.read_text(errors='replace'))}"
                    )
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            why = last_line(path.read_text(errors="replace"))
            raise GpuctlError(f"cannot pull {image}: {why}", "check the name, and that this node may pull it")
        self._say(f"pulled {image} in {time.monotonic() - began:.0f} s")

    def _load(self, runtime: ContainerRuntime, image: str, is_over: Callable[[], bool]) -> None:
        began = said_at = time.monotonic()
        name = images.shown(image)

        def on_bytes(come: int, total: int) -> None:
            nonlocal said_at
            if time.monotonic() > said_at + _SAY_EVERY_S:
                said_at = time.monotonic()
                self._do(f"pulling {name}: {come / total:.0%}")
                self._say(self.doing)

        def over() -> bool:
            return self._stopped.is_set() or is_over()

        self._say(f"pulling {name}")
        with tempfile.TemporaryDirectory(prefix=_LOADING, dir=self._folder) as scratch:
            bucket_images.load(self._store, image, runtime, self._client, Path(scratch), over, on_bytes)
        self._say(f"pulled {name} in {time.monotonic() - began:.0f} s")

    def _do(self, what: str) -> None:
        self.doing = what
        self._on_change()

    def _check(self, is_over: Callable[[], bool]) -> None:
        if self._stopped.is_set() or is_over():
            raise Fenced("the image is no longer needed")


def _names_of(image: str) -> list[str]:
    """What the runtime may call it, the full name last."""
    return [images.local_name(image)] if images.is_in_bucket(image) else [image, full_name(image)]


def _bucket_folder(url: str) -> tuple[str, ...]:
    """The folder of a bucket that is one, for scripts that use the bucket themselves."""
    if not url.startswith("file://"):
        return ()
    folder = Path(unquote(urlsplit(url).path))
    folder.mkdir(parents=True, exist_ok=True)
    return (str(folder),)


def _options(env: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(env.get(OPTIONS, "")))
    except ValueError as error:
        raise GpuctlError(f"{OPTIONS}: {error}", "write it as a shell would: -v '/my data:/data:ro'") from error
