"""Jobs in containers, with the Docker or Podman of this machine."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.containers.client import ContainerClient
from gpuctl.bootstrap.containers.command_lines import FOLDER_LABEL, OPTIONS, ContainerRuntime
from gpuctl.bootstrap.containers.node_containers import Containers
from gpuctl.bootstrap.launch.interpreter import LauncherExit
from gpuctl.bootstrap.network.nccl_env import OFI_PLUGINS
from gpuctl.cluster.errors import Fenced, GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import processes
from gpuctl.trainers.launchers.torchrun import LaunchSpec, WorkerFailure
from tests.fakes import containers
from tests.fakes.shared_objects import NEEDS_NEWER, PLUGIN, build, newer_than_here
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.machines


class Bench:
    """A node's folder with one job, and what runs its containers."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.node = folder / "node"
        self.job = self.node / "jobs" / "job"
        self.code = self.job / "code"
        self.code.mkdir(parents=True)
        self.exits: queue.Queue[LauncherExit] = queue.Queue()
        self.said: list[str] = []
        self.changed = threading.Event()
        self.rounds = 0
        self._env = {**os.environ, **env}
        self.store = open_bucket("memory://")
        self.begin()

    def begin(self, **more: str) -> None:
        """An agent, with ``more`` among its node's own variables."""
        node_env = {OPTIONS: shlex.join(containers.options()), "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1"}
        self.containers = Containers(
            self.node, self.store, {**node_env, **more}, self._env, False, self.said.append, self.changed.set
        )

    def launch(
        self, script: str, *, nproc: int = 1, image: str = containers.IMAGE, fabric: str = "", **env: str
    ) -> None:
        self.containers.fetch(image)
        self.rounds += 1
        path = self.code / "script.py"
        path.write_text(script)
        listening = socket.create_server(("127.0.0.1", 0))
        spec = LaunchSpec(
            job="job",
            round=self.rounds,
            rank=0,
            nodes=1,
            nproc=nproc,
            address="127.0.0.1",
            master_address="127.0.0.1",
            master_port=listening.getsockname()[1],
            script=str(path),
            args=("a", "b c"),
            cwd=str(self.code),
            env=env,
            log_dir=str(self.job / "rounds" / str(self.rounds) / "logs"),
        )
        self.launched = self.containers.launch(image, spec, self.job, listening, self.exits.put, fabric)

    def ended(self) -> LauncherExit:
        return self.exits.get(timeout=PATIENCE_S)

    def printed(self, local_rank: int = 0) -> str:
        logs = self.job.glob(f"rounds/{self.rounds}/logs/*/attempt_0/{local_rank}/std*.log")
        return "".join(path.read_text() for path in logs)

    def wait_for_line(self) -> str:
        _wait_for(lambda: self.printed().endswith("\n"))
        return self.printed().strip()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    containers.runtime()
    made = Bench(tmp_path)
    yield made
    containers.clear(made.node)


def test_a_script_runs_in_the_image_with_its_arguments_and_variables(bench: Bench) -> None:
    bench.launch(
        "import os, sys\n"
        "print(sys.argv[1:], os.environ['RANK'], os.environ['EXTRA'], os.path.exists('/home'), os.getcwd())\n"
        "from gpuctl.cluster.worker_context import WorkerContext\n"
        "open('written', 'w').close()\n",
        EXTRA="two\nlines",
    )
    assert bench.ended() == LauncherExit()
    assert bench.printed() == f"['a', 'b c'] 0 two\nlines False {bench.code}\n"
    assert (bench.code / "written").stat().st_uid == os.getuid()
    assert containers.left(bench.node) == []


def test_what_is_printed_in_a_container_stands_in_the_order_in_which_it_was_written(bench: Bench) -> None:
    bench.launch(
        "import sys\nfor i in range(50):\n    print('out', i)\n    print('err', i, file=sys.stderr)\nsys.exit(3)"
    )
    assert bench.ended() == LauncherExit((WorkerFailure(local_rank=0, exit_code=3),))
    assert bench.printed() == "".join(f"{stream} {i}\n" for i in range(50) for stream in ("out", "err"))


@pytest.fixture
def plugin() -> Iterator[str]:
    """A folder where NCCL's plug-in for EFA may be, on this machine."""
    folder = Path(OFI_PLUGINS[-1])
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        pytest.skip("only root may make the fabric's folders in /opt")
    yield str(folder)
    for one in made:
        one.rmdir()


SHOW = "import os\nprint(os.environ.get('LD_LIBRARY_PATH', ''), os.path.isdir({plugin!r}))"


@pytest.mark.parametrize("of_the_image", ["", "/image/lib"])
def test_the_hosts_library_path_stays_outside_but_for_the_fabrics(bench: Bench, plugin: str, of_the_image: str) -> None:
    bench.begin(LD_LIBRARY_PATH=f"{plugin}:/usr/local/cuda/lib64")
    option = ["--env", f"LD_LIBRARY_PATH={of_the_image}"] if of_the_image else []
    bench.launch(SHOW.format(plugin=plugin), GPUCTL_CONTAINER_OPTIONS=shlex.join([*containers.options(), *option]))
    assert bench.ended() == LauncherExit()
    before = f"{of_the_image}:" if of_the_image else ""
    assert bench.printed() == f"{before}{plugin} True\n"

    bench.begin(LD_LIBRARY_PATH="/usr/local/cuda/lib64")
    bench.launch(SHOW.format(plugin=plugin))
    assert bench.ended() == LauncherExit()
    assert bench.printed() == " False\n"


def test_an_image_that_speaks_of_its_own_plug_in_is_left_as_it_is(bench: Bench, plugin: str) -> None:
    image = "localhost/gpuctl-test-efa:1"
    own = ["--change", f"ENV OWN={plugin}"]
    subprocess.run([containers.runtime(), "import", *own, "-", image], input=containers.root(), check=True, timeout=60)
    bench.begin(LD_LIBRARY_PATH=plugin)
    bench.launch(SHOW.format(plugin=plugin), image=image)
    assert bench.ended() == LauncherExit()
    assert bench.printed() == " False\n"
    containers.ask(containers.runtime(), "image", "rm", image)


WITH_RUNTIME = "import ctypes\nprint(ctypes.CDLL('libnccl-net.so').begin())\n"


def test_a_job_does_not_begin_in_an_image_that_lacks_what_the_fabric_needs(bench: Bench, plugin: str) -> None:
    """The host's plug-in comes along: whether it can be loaded there depends on the image."""
    bench.begin(LD_LIBRARY_PATH=plugin)
    library = Path(plugin) / "libnccl-net.so"
    try:
        bench.launch(WITH_RUNTIME, fabric="efa")
        ended = bench.ended().error
        assert ended.startswith("NCCL cannot use EFA in this image: its plug-in cannot be loaded (libnccl-net.so: ")
        build(library, NEEDS_NEWER, *newer_than_here(bench.job))
        bench.launch(WITH_RUNTIME, fabric="efa")
        ended = bench.ended().error
        assert "version `LIBC_9.9' not found" in ended
        assert ended.endswith("gpuctl train --allow-tcp")
    finally:
        library.unlink(missing_ok=True)


def test_the_hosts_plug_in_finds_the_cuda_runtime_of_the_images_torch(bench: Bench, plugin: str) -> None:
    bench.begin(LD_LIBRARY_PATH=plugin)
    library = build(Path(plugin) / "libnccl-net.so", PLUGIN)
    build(bench.job / "torch/nvidia/cu13/lib/libcudart.so.13", "", "-Wl,-soname,libcudart.so.13")
    # Where this machine has a CUDA runtime, the image does: as an empty file it is none.
    nothing = bench.job / "ld.so.cache"
    nothing.touch()
    options = [*containers.options(), "--volume", f"{nothing}:/etc/ld.so.cache:ro"]
    try:
        bench.launch(
            WITH_RUNTIME,
            fabric="efa",
            PYTHONPATH=str(bench.job / "torch"),
            GPUCTL_CONTAINER_OPTIONS=shlex.join(options),
        )
        assert bench.ended() == LauncherExit()
    finally:
        library.unlink()
    assert bench.printed() == "0\n"


def test_the_file_with_the_machines_topology_can_be_read_inside(bench: Bench, tmp_path: Path) -> None:
    topology = tmp_path / "topo.xml"
    topology.write_text("<system/>")
    bench.begin(NCCL_TOPO_FILE=str(topology), MKL_VERBOSE="1")
    bench.launch("import os\nprint(open(os.environ['NCCL_TOPO_FILE']).read(), 'MKL_VERBOSE' in os.environ)")
    assert bench.ended() == LauncherExit()
    assert bench.printed() == "<system/> False\n"


def test_exit_codes_signals_and_tracebacks_are_told_by_local_rank(bench: Bench) -> None:
    bench.launch(
        "import os, time\nif os.environ['LOCAL_RANK'] == '1':\n    raise KeyError('x')\ntime.sleep(1000)\n", nproc=2
    )
    assert WorkerFailure(local_rank=1, exit_code=1) in bench.ended().failures
    assert "KeyError: 'x'" in bench.printed(1)
    bench.launch("import os; os.kill(os.getpid(), 9)")
    assert bench.ended() == LauncherExit((WorkerFailure(local_rank=0, exit_code=137),))


def test_workers_meet_through_the_port_that_was_kept(bench: Bench) -> None:
    script = "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nprint(d.get_world_size())\n"
    bench.launch(script, nproc=2)
    assert bench.ended() == LauncherExit()
    assert bench.printed(0) == bench.printed(1) == "2\n"


def test_a_worker_is_known_by_its_pid_here_and_hears_a_signal(bench: Bench) -> None:
    bench.launch(
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('listens', flush=True)\n"
        "time.sleep(1000)\n"
    )
    assert bench.wait_for_line() == "listens"
    (worker,) = bench.launched.workers()
    os.kill(worker, signal.SIGTERM)
    assert bench.ended() == LauncherExit((WorkerFailure(local_rank=0, exit_code=7),))


def test_kill_ends_everything_that_the_job_has_started(bench: Bench) -> None:
    bench.launch(
        "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\nprint('x', flush=True)\ntime.sleep(1000)"
    )
    bench.wait_for_line()
    inside = psutil.Process(bench.launched.pid).children(recursive=True)
    assert len(inside) == 2
    bench.launched.kill()
    assert bench.ended() == LauncherExit(killed=True)
    assert processes.wait_until_ended(inside, 10) == []
    assert containers.left(bench.node) == []


def test_a_container_that_is_killed_while_it_is_made_does_not_run(bench: Bench) -> None:
    bench.launch("open('ran', 'w').close()")
    bench.launched.kill()
    assert bench.ended() == LauncherExit(killed=True)
    assert not (bench.code / "ran").exists()
    assert containers.left(bench.node) == []


def test_no_variable_of_the_job_can_be_read_from_outside(bench: Bench) -> None:
    bench.launch("import time\nprint('x', flush=True)\ntime.sleep(1000)", TOKEN="hush-hush")
    bench.wait_for_line()
    (name,) = containers.left(bench.node)
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert any("container_entry.py" in line for line in lines)
    assert "hush-hush" not in " ".join(lines) + containers.ask(containers.runtime(), "inspect", name).stdout
    assert [path for path in bench.node.rglob("*") if path.is_file() and b"hush-hush" in path.read_bytes()] == []
    bench.launched.kill()
    assert bench.ended() == LauncherExit(killed=True)


def test_an_image_without_torch_is_told_from_a_script_that_fails(bench: Bench) -> None:
    bench.launch("pass", GPUCTL_CONTAINER_OPTIONS=shlex.join([*containers.options(), "--env", "PATH=/usr/bin"]))
    assert bench.ended() == LauncherExit(error="no python in this image has torch")


def test_an_option_that_the_runtime_refuses_is_told_in_its_words(bench: Bench) -> None:
    bench.launch("pass", GPUCTL_CONTAINER_OPTIONS="--no-such-option")
    error = bench.ended().error
    assert "no-such-option" in error or "--help" in error
    with pytest.raises(GpuctlError, match=OPTIONS):
        bench.launch("pass", GPUCTL_CONTAINER_OPTIONS="'unfinished")


def test_an_agent_that_starts_removes_what_its_last_life_has_left(bench: Bench, tmp_path: Path) -> None:
    bench.launch("pass")
    assert bench.ended() == LauncherExit()
    run = ["run", "-d", "--network", "host", *containers.options()]
    for folder in (bench.node, tmp_path / "other"):
        label = f"{FOLDER_LABEL}={folder}"
        assert (
            containers.ask(containers.runtime(), *run, "--label", label, containers.IMAGE, "sleep", "1000").returncode
            == 0
        )
    Bench(tmp_path / "new").containers.sweep()
    Containers(bench.node, bench.store, {}, os.environ, False, bench.said.append, lambda: None).sweep()
    assert containers.left(bench.node) == []
    assert len(containers.left(tmp_path / "other")) == 1
    containers.clear(tmp_path / "other")


def test_an_image_is_pulled_once_and_people_can_see_it(tmp_path: Path) -> None:
    containers.runtime()
    gate = threading.Event()
    with containers.registry(gate) as image:
        bench = Bench(tmp_path, **containers.trusting(tmp_path, image))
        pulling = threading.Thread(target=bench.containers.fetch, args=[image])
        pulling.start()
        _wait_for(lambda: bench.containers.doing == f"pulling {image}")
        gate.set()
        pulling.join(PATIENCE_S)
        assert bench.containers.doing == ""
        assert bench.said[0] == f"pulling {image}" and bench.said[-1].startswith(f"pulled {image} in ")
        said = len(bench.said)
        bench.containers.fetch(image)
        Bench(tmp_path / "again").containers.fetch(image)
        assert len(bench.said) == said


@pytest.mark.parametrize("how", ["the job is over", "the node leaves"])
def test_a_pull_that_nobody_waits_for_is_broken_off(tmp_path: Path, how: str) -> None:
    containers.runtime()
    over = threading.Event()
    with containers.registry(threading.Event()) as image:
        bench = Bench(tmp_path, **containers.trusting(tmp_path, image))
        failed: queue.Queue[BaseException] = queue.Queue()

        def fetch() -> None:
            try:
                bench.containers.fetch(image, over.is_set)
            except Fenced as error:
                failed.put(error)

        threading.Thread(target=fetch).start()
        _wait_for(lambda: bench.containers.doing == f"pulling {image}")
        over.set() if how == "the job is over" else bench.containers.stop()
        assert "no longer needed" in str(failed.get(timeout=10))
        assert bench.containers.doing == ""


def test_an_image_that_cannot_be_pulled_is_named_with_the_registrys_words(bench: Bench) -> None:
    with pytest.raises(GpuctlError, match=r"cannot pull 127\.0\.0\.1:1/nothing:1: .*refused") as caught:
        bench.containers.fetch("127.0.0.1:1/nothing:1")
    assert "\n" not in caught.value.message
    with containers.registry(threading.Event()) as image:
        bench = Bench(bench.node, **containers.trusting(bench.node, image))
        with pytest.raises(GpuctlError, match=r"cannot pull .*/other:1: ") as caught:
            bench.containers.fetch(image.replace("tiny", "other"))


def test_without_a_runtime_the_answer_is_one_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path, os.environ["PATH"] = os.environ["PATH"], str(tmp_path)
    try:
        with pytest.raises(GpuctlError, match="neither Docker nor Podman is installed on this node"):
            bench.containers.fetch("debian")
    finally:
        os.environ["PATH"] = path


@pytest.mark.parametrize(
    ("manager", "rootless", "more", "scopes"),
    [
        ("systemd", False, {"serviceIsRemote": False}, True),
        ("systemd", False, {}, True),
        ("systemd", True, {"serviceIsRemote": False}, False),
        ("systemd", False, {"serviceIsRemote": True}, False),
        ("cgroupfs", False, {"serviceIsRemote": False}, False),
    ],
    ids=["root", "old", "rootless", "remote", "cgroupfs"],
)
def test_where_podman_would_ask_systemd_for_a_scope_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str, rootless: bool, more: dict[str, bool], scopes: bool
) -> None:
    told = json.dumps({"host": {"cgroupManager": manager, "security": {"rootless": rootless}, **more}})
    podman = tmp_path / "podman"
    podman.write_text(f"#!/bin/sh\necho '{told}'\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = ContainerClient(os.environ).find()
    assert found == ContainerRuntime("podman", str(podman), rootless=rootless, scopes=scopes)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
