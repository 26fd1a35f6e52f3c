"""The command lines that run a job's workers in a container image, as pure functions of what was asked and found.

``node_containers`` has the facts and runs them; ``container_entry`` is what starts inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gpuctl.bootstrap.network.nccl_env import INSTALLED, LIBFABRIC, OFI_PLUGINS
from gpuctl.trainers.launchers.torchrun import TORCHRUN, LaunchSpec

FOLDER_LABEL = "gpuctl.folder"
"""Label of each container: the folder of the node that started it."""

LIBRARY = "/opt/gpuctl/library"
"""Where gpuctl's source is inside, to be read only."""

OPTIONS = "GPUCTL_CONTAINER_OPTIONS"
"""In the agent's environment: further options of ``docker run`` or ``podman run``, written as a shell would."""

_FABRIC_FOLDERS = ("/dev/infiniband",)
"""Devices of EFA and of InfiniBand alike."""
_FABRIC_DEVICES = ("/dev/gdrdrv",)
_NCCL_CONF = "/etc/nccl.conf"
"""NCCL's own file of variables. Azure's images name there what the hypervisor hides, in files beside it: the size's
topology and, on NC A100 v4, its graph, without which NCCL does not begin at all (azhpc-images, customizations/ncv4.sh;
NCCL, src/graph/xml.cc)."""

_TOLD = "/run/gpuctl"
"""What the agent tells all on the machine, such as who is rank 0: a folder, since its files are replaced."""

_PASSED = ("AWS_", "AZURE_", "GOOGLE_", "GPUCTL_", "CUDA_VISIBLE_", "NCCL_", "GLOO_", "FI_", "UCX_", "OMP_", "RES_")
_SCRATCH = "/scratch"
_IN_SCRATCH = f"{_SCRATCH}/"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_NAMES_A_FILE = (
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "NCCL_GRAPH_FILE",
    "NCCL_TOPO_FILE",
)

# An image need not say which of its interpreters is the one with torch, or whatever the job needs.
_FIND_PYTHON = (
    'for python in python3 python; do "$python" -c "import importlib.util as u, sys;'
    ' sys.exit(u.find_spec(\'{package}\') is None)" 2>/dev/null && exec "$python" "$@"; done;'
    ' echo "no python in this image has {package}" >&2; exit 127'
)


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """A program that runs containers."""

    kind: Literal["docker", "podman"]
    program: str
    rootless: bool = False
    """Root inside is the user who runs it, outside."""
    scopes: bool = False
    """Podman would have systemd make a scope for each container, which a shutdown stops at once: the job would be gone
    before its last checkpoint (podman issue 3148)."""


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The devices of a node that its containers may use."""

    gpus: bool = False
    devices: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    uid: int = 0
    gid: int = 0
    options: tuple[str, ...] = ()
    """Of ``OPTIONS``."""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container: a job's workers on a node, for one round."""

    name: str
    image: str
    labels: Mapping[str, str]
    cwd: str
    writable: tuple[str, ...]
    """Files and folders that are there under the same path."""
    readable: tuple[str, ...]
    """The same, to be read only."""
    library: Path
    """gpuctl's own package, as it is installed on the node."""
    meeting: str
    """Folder where the agent listens (see ``container_entry``)."""
    package: str = "torch"
    """What the job's interpreter must have; empty: any will do."""


def found_machine(gpus: bool, uid: int, gid: int, options: tuple[str, ...], root: Path = Path("/")) -> HostDevices:
    """Find the host's devices below ``root``."""

    def there(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path for path in paths if (root / path.lstrip("/")).exists())

    folders = tuple(path for path in there(_FABRIC_FOLDERS) if any((root / path.lstrip("/")).iterdir()))
    files = there((_TOLD, _NCCL_CONF))
    if _NCCL_CONF in files:
        files += there(_paths_in((root / _NCCL_CONF[1:]).read_text(errors="replace")))
    return HostDevices(gpus, folders + there(_FABRIC_DEVICES), files, uid, gid, options)


def _paths_in(config: str) -> tuple[str, ...]:
    """Values that are absolute paths, of lines ``NAME=VALUE``; comments begin with ``#``."""
    values = (line.partition("=")[2].strip() for line in config.splitlines() if not line.lstrip().startswith("#"))
    return tuple(dict.fromkeys(value for value in values if value.startswith("/")))


@dataclass(frozen=True, slots=True)
class FabricLibraries:
    """The libraries of a node's fabric, for images that have none."""

    mounted: tuple[str, ...] = ()
    """Folders that are there under the same path, to be read only."""
    searched: tuple[str, ...] = ()
    """Folders in them, to come after those in the image's ``LD_LIBRARY_PATH``."""


def fabric_libraries(library_path: str, image_env: str, root: Path = Path("/")) -> FabricLibraries:
    """What a node with ``library_path`` as its ``LD_LIBRARY_PATH`` has below ``root``, if that names NCCL's plug-in for
    EFA. Nothing for an image whose variables ``image_env`` speak of its own: that is built for it."""
    plugins = [folder for folder in library_path.split(":") if folder in OFI_PLUGINS]
    if not plugins or any(folder in image_env for folder in INSTALLED):
        return FabricLibraries()

    def there(paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if (root / path.lstrip("/")).is_dir())

    return FabricLibraries(there(INSTALLED), there([*plugins, *LIBFABRIC]))


def run_command(runtime: ContainerRuntime, machine: HostDevices, box: ContainerSpec) -> list[str]:
    """Run ``box`` in the foreground and remove it afterwards. No variable of the job is on it."""
    user = "0:0" if runtime.rootless else f"{machine.uid}:{machine.gid}"
    own_cgroups = ["--cgroup-manager", "cgroupfs"] if runtime.scopes else []
    command = [runtime.program, *own_cgroups, "run", "--rm", "--pull", "never", "--name", box.name]
    for name, value in box.labels.items():
        command += ["--label", f"{name}={value}"]
    command += ["--network", "host", "--ipc", "host", "--pids-limit", "-1", "--log-driver", "none"]
    command += ["--security-opt", "label=disable", "--user", user, "--workdir", box.cwd]
    command += _gpu_options(runtime, machine) + _fabric_options(runtime, machine)
    for path in box.writable:
        command += ["--volume", f"{path}:{path}"]
    for path in dict.fromkeys((*box.readable, *machine.files)):  # the same twice is an error
        command += ["--volume", f"{path}:{path}:ro"]
    for part in ("__init__.py", "jax.py", "cluster", "trainers"):
        # Each by itself, because a floor may be a link to somewhere else.
        command += ["--volume", f"{(box.library / part).resolve()}:{LIBRARY}/gpuctl/{part}:ro"]
    command += [*machine.options, "--entrypoint", "sh", box.image]
    find = _FIND_PYTHON.replace("{package}", box.package or "sys")
    return [*command, "-c", find, "sh", f"{LIBRARY}/gpuctl/trainers/launchers/container_entry.py", box.meeting]


def pull_command(runtime: ContainerRuntime, image: str) -> list[str]:
    return [runtime.program, "pull", full_name(image)]


def build_command(
    runtime: ContainerRuntime, name: str, context: Path, dockerfile: str, options: Sequence[str]
) -> list[str]:
    """Build the image ``name`` from what is in ``context``."""
    own_cgroups = ["--cgroup-manager", "cgroupfs"] if runtime.scopes else []
    file = str(context / dockerfile)
    return [runtime.program, *own_cgroups, "build", "--tag", name, "--file", file, *options, str(context)]


def save_command(runtime: ContainerRuntime, name: str, archive: Path) -> list[str]:
    """Save the image ``name`` as a tar that has a ``manifest.json``."""
    form = ["--format", "docker-archive"] if runtime.kind == "podman" else []
    return [runtime.program, "save", *form, "--output", str(archive), name]


def remove_command(runtime: ContainerRuntime, names: Sequence[str]) -> list[str]:
    """Kill and remove them at once."""
    return [runtime.program, "rm", "--force", *(["--time", "0"] if runtime.kind == "podman" else []), *names]


def list_command(runtime: ContainerRuntime, folder: str) -> list[str]:
    """The containers, running or not, that the node in ``folder`` has started."""
    return [runtime.program, "ps", "--all", "--quiet", "--filter", f"label={FOLDER_LABEL}={folder}"]


def full_name(image: str) -> str:
    """The name with its registry, so that an image is the same one with Docker and with Podman.

    >>> full_name("pytorch/pytorch:2.9.0"), full_name("debian"), full_name("ghcr.io/me/mine:1")
    ('docker.io/pytorch/pytorch:2.9.0', 'docker.io/library/debian', 'ghcr.io/me/mine:1')
    """
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def launch_order(spec: LaunchSpec) -> dict[str, Any]:
    """What ``container_entry`` is told of the launch itself."""
    if spec.launcher == TORCHRUN:
        return {"args": torchrun_args(spec)}
    script = [spec.script, *spec.args]
    return {"args": script, "launcher": spec.launcher, "world": asdict(spec.world), "log_dir": spec.log_dir}


def torchrun_args(spec: LaunchSpec) -> list[str]:
    """The round's launch, as ``torchrun`` has it on its command line."""
    return [
        *("--nnodes", str(spec.nodes), "--node-rank", str(spec.rank), "--nproc-per-node", str(spec.nproc)),
        *("--master-addr", spec.master_address, "--master-port", str(spec.master_port)),
        *("--rdzv-id", spec.run_id, "--rdzv-conf", f"timeout={_RENDEZVOUS_S}", "--max-restarts", "0"),
        *("--log-dir", spec.log_dir, "--redirects", "3"),
        spec.script,
        *spec.args,
    ]


_RENDEZVOUS_S = 3600
"""For all nodes to have come, one of which may have the image still to pull. A lost one is noticed otherwise."""


def passed(env: Mapping[str, str]) -> dict[str, str]:
    """Those of the agent's variables that mean something in an image with paths of its own; ``/scratch`` it has too."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_PASSED) or name.lower() in _PROXIES or value.startswith(_IN_SCRATCH)
    }


def scratch_folder(env: Mapping[str, str]) -> tuple[str, ...]:
    """``/scratch``, if variables in ``env`` lead there (see ``boot.scratch.cache_env``)."""
    return (_SCRATCH,) if any(value.startswith(_IN_SCRATCH) for value in env.values()) else ()


def named_files(env: Mapping[str, str]) -> tuple[str, ...]:
    """Files that variables in ``env`` name: with credentials, or with the map of the machine's cards."""
    paths = (env.get(name, "") for name in _NAMES_A_FILE)
    return tuple(path for path in paths if path.startswith("/") and Path(path).is_file())


def _gpu_options(runtime: ContainerRuntime, machine: HostDevices) -> list[str]:
    if not machine.gpus:
        return []
    return ["--gpus", "all"] if runtime.kind == "docker" else ["--device", "nvidia.com/gpu=all"]


def _fabric_options(runtime: ContainerRuntime, machine: HostDevices) -> list[str]:
    options = [word for device in machine.devices for word in ("--device", device)]
    if set(machine.devices) & set(_FABRIC_FOLDERS):
        options += ["--cap-add", "IPC_LOCK"]
    if (machine.gpus or options) and not runtime.rootless:  # who is not root may not raise it
        options += ["--ulimit", "memlock=-1:-1"]
    return options
