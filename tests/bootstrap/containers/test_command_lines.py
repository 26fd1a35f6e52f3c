"""The command lines of containers, by value."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpuctl.bootstrap.containers.command_lines import (
    ContainerRuntime,
    ContainerSpec,
    FabricLibraries,
    HostDevices,
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
    torchrun_args,
)
from gpuctl.trainers.launchers import container_entry
from gpuctl.trainers.launchers.adapter import World
from gpuctl.trainers.launchers.torchrun import LaunchSpec

DOCKER = ContainerRuntime("docker", "/usr/bin/docker")
PODMAN = ContainerRuntime("podman", "/usr/bin/podman")
BARE = HostDevices()
BOX = ContainerSpec(
    name="gpuctl-train-1-2-abc",
    image="pytorch/pytorch:2.9.0",
    labels={"gpuctl.folder": "/var/lib/gpuctl/node"},
    cwd="/node/jobs/train-1/code",
    writable=("/node/jobs/train-1",),
    readable=("/root/key.json",),
    library=Path("/venv/gpuctl"),
    meeting="/node/jobs/train-1/rounds/000002/container",
)


def test_a_container_has_the_hosts_network_and_ipc_and_the_jobs_folders() -> None:
    command = run_command(DOCKER, BARE, BOX)
    at = command.index("--entrypoint")
    assert command[:at] == [
        *("/usr/bin/docker", "run", "--rm", "--pull", "never", "--name", "gpuctl-train-1-2-abc"),
        *("--label", "gpuctl.folder=/var/lib/gpuctl/node"),
        *("--network", "host", "--ipc", "host", "--pids-limit", "-1", "--log-driver", "none"),
        *("--security-opt", "label=disable", "--user", "0:0", "--workdir", "/node/jobs/train-1/code"),
        *("--volume", "/node/jobs/train-1:/node/jobs/train-1"),
        *("--volume", "/root/key.json:/root/key.json:ro"),
        *("--volume", "/venv/gpuctl/__init__.py:/opt/gpuctl/library/gpuctl/__init__.py:ro"),
        *("--volume", "/venv/gpuctl/jax.py:/opt/gpuctl/library/gpuctl/jax.py:ro"),
        *("--volume", "/venv/gpuctl/cluster:/opt/gpuctl/library/gpuctl/cluster:ro"),
        *("--volume", "/venv/gpuctl/trainers:/opt/gpuctl/library/gpuctl/trainers:ro"),
    ]
    assert command[at : at + 4] == ["--entrypoint", "sh", "pytorch/pytorch:2.9.0", "-c"]
    assert command[-3:] == ["sh", "/opt/gpuctl/library/gpuctl/trainers/launchers/container_entry.py", BOX.meeting]


CARD = HostDevices(gpus=True)
EFA = HostDevices(gpus=True, devices=("/dev/infiniband", "/dev/gdrdrv"), files=("/etc/nccl.conf",))
FABRIC_ONLY = HostDevices(devices=("/dev/infiniband",))
UNLIMITED = ["--ulimit", "memlock=-1:-1"]
FABRIC = ["--device", "/dev/infiniband", "--device", "/dev/gdrdrv", "--cap-add", "IPC_LOCK", *UNLIMITED]
TOPOLOGY = ["--volume", "/etc/nccl.conf:/etc/nccl.conf:ro"]


@pytest.mark.parametrize(
    ("runtime", "machine", "more"),
    [
        (DOCKER, BARE, []),
        (PODMAN, BARE, []),
        (DOCKER, CARD, ["--gpus", "all", *UNLIMITED]),
        (PODMAN, CARD, ["--device", "nvidia.com/gpu=all", *UNLIMITED]),
        (DOCKER, EFA, ["--gpus", "all", *FABRIC, *TOPOLOGY]),
        (PODMAN, EFA, ["--device", "nvidia.com/gpu=all", *FABRIC, *TOPOLOGY]),
        (DOCKER, FABRIC_ONLY, ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK", *UNLIMITED]),
        (DOCKER, HostDevices(options=("--shm-size", "1g")), ["--shm-size", "1g"]),
    ],
)
def test_cards_the_fabric_and_further_options_add_to_it(
    runtime: ContainerRuntime, machine: HostDevices, more: list[str]
) -> None:
    bare = run_command(runtime, BARE, BOX)
    added = list(run_command(runtime, machine, BOX))
    for word in bare:
        added.remove(word)
    rest = list(more)
    if "--volume" in more:
        assert "--volume /etc/nccl.conf:/etc/nccl.conf:ro" in " ".join(run_command(runtime, machine, BOX))
    assert sorted(added) == sorted(rest)
    for option, value in zip(more[::2], more[1::2], strict=True):
        assert f"{option} {value}" in " ".join(run_command(runtime, machine, BOX))


@pytest.mark.parametrize(
    ("rootless", "uid", "user"), [(False, 0, "0:0"), (False, 1000, "1000:1001"), (True, 1000, "0:0")]
)
def test_what_a_job_writes_belongs_to_the_agents_user(rootless: bool, uid: int, user: str) -> None:
    machine = HostDevices(uid=uid, gid=uid and uid + 1, gpus=True)
    command = run_command(ContainerRuntime("podman", "podman", rootless=rootless), machine, BOX)
    assert command[command.index("--user") + 1] == user
    assert ("memlock=-1:-1" in command) is not rootless


def test_podman_makes_cgroups_that_outlive_the_beginning_of_a_shutdown() -> None:
    """Of a scope, systemd would end the job at once."""
    command = run_command(ContainerRuntime("podman", "podman", scopes=True), HostDevices(), BOX)
    assert command[:4] == ["podman", "--cgroup-manager", "cgroupfs", "run"]
    assert run_command(PODMAN, HostDevices(), BOX)[:2] == [PODMAN.program, "run"]


def test_an_image_is_the_same_one_with_docker_and_with_podman() -> None:
    names = [
        "debian",
        "pytorch/pytorch:2.9.0",
        "ghcr.io/me/mine",
        "localhost/mine:1",
        "10.0.0.1:5000/mine",
        "host:5000/m",
    ]
    assert [full_name(name) for name in names] == ["docker.io/library/debian", f"docker.io/{names[1]}", *names[2:]]
    assert pull_command(PODMAN, "debian:12") == ["/usr/bin/podman", "pull", "docker.io/library/debian:12"]


def test_leftovers_are_found_by_their_node_and_removed_without_waiting() -> None:
    assert list_command(DOCKER, "/n")[1:] == ["ps", "--all", "--quiet", "--filter", "label=gpuctl.folder=/n"]
    assert remove_command(DOCKER, ["a", "b"])[1:] == ["rm", "--force", "a", "b"]
    assert remove_command(PODMAN, ["a"])[1:] == ["rm", "--force", "--time", "0", "a"]


def test_the_round_is_torchruns_command_line() -> None:
    spec = LaunchSpec(
        job="train-1",
        round=2,
        rank=1,
        nodes=4,
        nproc=8,
        address="10.0.0.2",
        master_address="10.0.0.1",
        master_port=4711,
        script="/code/train.py",
        args=("--lr", "0.1"),
        cwd="/code",
        env={},
        log_dir="/logs",
    )
    assert " ".join(torchrun_args(spec)) == (
        "--nnodes 4 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 4711"
        " --rdzv-id train-1-2 --rdzv-conf timeout=3600 --max-restarts 0 --log-dir /logs --redirects 3"
        " /code/train.py --lr 0.1"
    )


def test_another_launcher_is_told_the_round_instead() -> None:
    spec = LaunchSpec(
        job="train-1",
        round=2,
        rank=1,
        nodes=2,
        nproc=1,
        address="10.0.0.2",
        master_address="10.0.0.1",
        master_port=4711,
        script="/code/train.py",
        args=("--lr", "0.1"),
        cwd="/code",
        env={},
        log_dir="/logs",
        launcher="jax",
        hosts=("10.0.0.1", "10.0.0.2"),
        nprocs=(1, 1),
    )
    order = launch_order(spec)
    assert (order["args"], order["launcher"], order["log_dir"]) == (["/code/train.py", "--lr", "0.1"], "jax", "/logs")
    assert (
        World(**order["world"])
        == spec.world
        == World("train-1", 2, 1, ("10.0.0.1", "10.0.0.2"), (1, 1), "10.0.0.1", 4711)
    )


@pytest.mark.parametrize(("package", "looked_for"), [("torch", "torch"), ("jax", "jax"), ("", "sys")])
def test_the_interpreter_is_one_with_what_the_launcher_needs(package: str, looked_for: str) -> None:
    command = run_command(DOCKER, BARE, replace(BOX, package=package))
    (find,) = [word for word in command if "find_spec" in word]
    assert f"find_spec('{looked_for}')" in find and f"has {looked_for}" in find


def test_of_the_agents_variables_those_pass_that_mean_something_elsewhere() -> None:
    meant = {"AWS_REGION": "r", "NCCL_DEBUG": "INFO", "GPUCTL_NODE_DIR": "/n", "https_proxy": "p", "NO_PROXY": "h"}
    meant |= {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2"}
    assert passed({**meant, "PATH": "/usr/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/x", "CUDA_HOME": "/y"}) == meant


def test_caches_on_the_scratch_volume_outlive_the_container() -> None:
    env = {"XDG_CACHE_HOME": "/scratch/cache", "TMPDIR": "/scratch/tmp"}
    assert passed({**env, "TMP": "/tmp"}) == env
    assert scratch_folder(env) == ("/scratch",)
    assert scratch_folder({"TMPDIR": "/tmp", "OTHER": "/scratches/1"}) == ()


def test_files_with_credentials_come_along(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    key.touch()
    env = {"GOOGLE_APPLICATION_CREDENTIALS": str(key), "AWS_CONFIG_FILE": "/not/there", "OTHER": str(key)}
    assert named_files(env) == (str(key),)


def test_the_map_of_the_machines_cards_comes_along(tmp_path: Path) -> None:
    topology = tmp_path / "ndv5-topo.xml"
    topology.touch()
    assert named_files({"NCCL_TOPO_FILE": str(topology)}) == (str(topology),)


def test_the_fabrics_libraries_come_along_where_they_are_and_the_image_has_none(tmp_path: Path) -> None:
    plugin = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"
    for folder in (plugin, "/opt/amazon/efa/lib", "/usr/local/cuda/lib64"):
        (tmp_path / folder[1:]).mkdir(parents=True)
    path = f"{plugin}:/usr/local/cuda/lib64"
    found = fabric_libraries(path, "[PATH=/usr/bin LD_LIBRARY_PATH=/usr/local/lib]", tmp_path)
    assert found == FabricLibraries(("/opt/amazon/ofi-nccl", "/opt/amazon/efa"), (plugin, "/opt/amazon/efa/lib"))
    assert fabric_libraries("/usr/local/cuda/lib64", "", tmp_path) == FabricLibraries(), "the host's CUDA stays outside"
    assert fabric_libraries(path, "[LD_LIBRARY_PATH=/opt/amazon/efa/lib:/x]", tmp_path) == FabricLibraries()
    assert fabric_libraries(path, "", tmp_path / "nothing") == FabricLibraries()


def test_only_devices_that_are_there_are_asked_for(tmp_path: Path) -> None:
    assert found_machine(False, 0, 0, (), tmp_path) == HostDevices()
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    assert found_machine(False, 0, 0, (), tmp_path).devices == ()
    (tmp_path / "dev/infiniband/uverbs0").touch()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").touch()
    (tmp_path / "run/gpuctl").mkdir(parents=True)
    found = found_machine(True, 1, 2, ("-v", "/data:/data"), tmp_path)
    assert found == HostDevices(
        True, ("/dev/infiniband",), ("/run/gpuctl", "/etc/nccl.conf"), 1, 2, ("-v", "/data:/data")
    )


_AZURE = {
    "ndv4": "NCCL_IB_PCI_RELAXED_ORDERING=1\nNCCL_TOPO_FILE=/opt/microsoft/ndv4/topo.xml\nNCCL_IGNORE_CPU_AFFINITY=1\n",
    "ncv4": (
        "NCCL_TOPO_FILE=/opt/microsoft/ncv4/topo.xml\nNCCL_GRAPH_FILE=/opt/microsoft/ncv4/graph.xml\n"
        "NCCL_IGNORE_CPU_AFFINITY=1\n"
    ),
}
"""``/etc/nccl.conf`` as azhpc-images' components/customizations write it."""


@pytest.mark.parametrize("size", _AZURE)
def test_every_file_that_nccls_own_configuration_names_comes_along_at_its_path(tmp_path: Path, size: str) -> None:
    """NCCL does not begin without a graph file that it was told of."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text(f"# NCCL_DEBUG_FILE=/commented/out\n{_AZURE[size]}NCCL_OTHER=/not/there\n")
    folder = tmp_path / "opt/microsoft" / size
    folder.mkdir(parents=True)
    for name in ("topo", "graph"):
        (folder.parent / f"{size}-{name}.xml").touch()
        (folder / f"{name}.xml").symlink_to(folder.parent / f"{size}-{name}.xml")
    found = found_machine(True, 0, 0, (), tmp_path)
    named = [line.partition("=")[2] for line in _AZURE[size].splitlines() if "_FILE=" in line]
    assert found.files == ("/etc/nccl.conf", *named)
    command = " ".join(run_command(DOCKER, found, replace(BOX, readable=(named[0],))))
    assert [command.count(f"--volume {path}:{path}:ro") for path in named] == [1] * len(named)


def test_what_runs_inside_needs_an_old_python_and_its_standard_library_alone() -> None:
    tree = ast.parse(Path(container_entry.__file__).read_text(), feature_version=(3, 8))
    names = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
