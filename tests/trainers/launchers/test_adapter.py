"""What each launcher tells its processes."""

from __future__ import annotations

import ast
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from gpuctl.trainers import failing_exit, jax_world
from gpuctl.trainers.launchers import adapter, key_value_store, process_group
from gpuctl.trainers.launchers.adapter import Process, World, all_variables, named, names, stop_signal

WORLD = World("digits-3", 7, 1, ("10.0.0.1", "10.0.0.2", "10.0.0.3"), (2, 4, 2), "10.0.0.1", 4242)


def _of(launcher: str, local_rank: int = 3, **more: object) -> dict[str, str]:
    return all_variables(named(launcher), Process(WORLD, local_rank, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("launcher", names())
def test_every_process_has_the_plain_variables(launcher: str) -> None:
    found = _of(launcher)
    assert (
        found.items()
        >= {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "4",
            "NODE_RANK": "1",
            "NNODES": "3",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "3",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "4242",
            "GPUCTL_NODE_ADDRESSES": "10.0.0.1,10.0.0.2,10.0.0.3",
            "GPUCTL_LAUNCHER": launcher,
        }.items()
    )
    assert [name for name in found if re.match("PMI|SLURM|OMPI", name)] == [], "nobody asked for them"


def test_torchruns_workers_have_what_torchrun_gives_them() -> None:
    assert (
        _of("torchrun").items()
        >= {"ROLE_RANK": "5", "ROLE_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "digits-3-7"}.items()
    )


def test_jax_is_told_by_variables_too() -> None:
    found = _of("jax")
    assert found["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:4242"
    assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"], found["JAX_LOCAL_DEVICE_IDS"]) == ("8", "5", "3")
    assert found["JAX_ENABLE_PREEMPTION_SERVICE"] == "0"
    asked = _of("jax", env={"JAX_ENABLE_PREEMPTION_SERVICE": "1"})
    assert asked["JAX_ENABLE_PREEMPTION_SERVICE"] == "1", "sync points are for those who ask"


def test_one_jax_process_a_node_has_all_of_its_devices() -> None:
    alone = World("j", 1, 0, ("fd00::1", "fd00::2"), (1, 1), "fd00::1", 9)
    found = all_variables(named("jax"), Process(alone, 0))
    assert "JAX_LOCAL_DEVICE_IDS" not in found and found["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:9"


def test_tensorflow_is_told_every_port() -> None:
    peers = tuple(f"10.0.0.1:{port}" for port in range(8))
    assert json.loads(_of("tensorflow", peers=peers)["TF_CONFIG"]) == {
        "cluster": {"worker": [*peers]},
        "task": {"type": "worker", "index": 5},
    }


def test_tensorflow_uses_keras_2_where_it_is_installed_and_nobody_says_otherwise() -> None:
    assert "TF_USE_LEGACY_KERAS" not in _of("tensorflow")
    assert _of("tensorflow", packages=frozenset({"tf_keras"}))["TF_USE_LEGACY_KERAS"] == "1"
    said = _of("tensorflow", packages=frozenset({"tf_keras"}), env={"TF_USE_LEGACY_KERAS": "0"})
    assert "TF_USE_LEGACY_KERAS" not in said


@pytest.mark.parametrize(("local_rank", "cross"), [(0, ("1", "3")), (1, ("1", "3")), (2, ("0", "1")), (3, ("0", "1"))])
def test_horovods_cross_ranks_are_among_the_nodes_that_have_such_a_local_rank(
    local_rank: int, cross: tuple[str, str]
) -> None:
    found = _of("horovod", local_rank)
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == cross
    assert (found["HOROVOD_RANK"], found["HOROVOD_SIZE"]) == (str(2 + local_rank), "8")
    assert (found["HOROVOD_LOCAL_RANK"], found["HOROVOD_LOCAL_SIZE"]) == (str(local_rank), "4")


def test_horovods_ranks_meet_at_the_master_and_are_patient_as_asked() -> None:
    found = _of("horovod", env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "7", "GLOO_SOCKET_IFNAME": "eth1"})
    assert (found["HOROVOD_GLOO_RENDEZVOUS_ADDR"], found["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "4242")
    assert (found["HOROVOD_GLOO_TIMEOUT_SECONDS"], found["HOROVOD_GLOO_IFACE"]) == ("7", "eth1")
    assert "HOROVOD_GLOO_IFACE" not in _of("horovod")
    here = World("j", 1, 0, ("127.0.0.2",), (1,), "127.0.0.2", 9)
    assert all_variables(named("horovod"), Process(here, 0))["HOROVOD_GLOO_IFACE"] == "lo"


def test_slurms_and_open_mpis_variables_are_for_those_who_ask() -> None:
    found = _of("exec:slurm:ompi")
    assert (found["SLURM_PROCID"], found["SLURM_NTASKS"], found["SLURM_LOCALID"]) == ("5", "8", "3")
    assert (found["SLURM_NODEID"], found["SLURM_NNODES"]) == ("1", "3")
    assert (found["OMPI_COMM_WORLD_RANK"], found["OMPI_COMM_WORLD_SIZE"]) == ("5", "8")
    assert not [name for name in found if name.startswith("PMI")]


def test_an_unknown_launcher_or_option_is_refused_with_those_that_there_are() -> None:
    assert names() == ["exec", "horovod", "jax", "tensorflow", "torchrun"]
    with pytest.raises(ValueError, match="is not a launcher; use one of: exec, horovod, jax, tensorflow, torchrun"):
        named("mpi")
    with pytest.raises(ValueError, match="unknown option of exec, 'pbs'; use one of: slurm, ompi"):
        named("exec:pbs")
    with pytest.raises(ValueError, match="unknown option of jax, ''; it has no options"):
        named("jax:")


def test_processes_are_asked_to_stop_by_a_signal_that_their_framework_leaves_alone() -> None:
    assert {name: stop_signal(named(name), {}) for name in names()} == {
        "exec": signal.SIGTERM,
        "horovod": signal.SIGUSR1,
        "jax": signal.SIGUSR1,
        "tensorflow": signal.SIGUSR1,
        "torchrun": signal.SIGTERM,
    }
    assert stop_signal(named("jax"), {"GPUCTL_STOP_SIGNAL": "SIGTERM"}) == signal.SIGTERM
    assert not adapter.is_stop_signal("KILL")


READ_IN_IMAGES = [
    failing_exit,
    jax_world,
    adapter,
    key_value_store,
    process_group,
    *(named(name).variables.__globals__ for name in names()),
]


@pytest.mark.parametrize("module", READ_IN_IMAGES, ids=lambda one: str(getattr(one, "__name__", "") or one["__name__"]))
def test_what_images_read_needs_an_old_python_and_its_standard_library_alone(module: object) -> None:
    path = Path(module["__file__"] if isinstance(module, dict) else module.__file__)  # type: ignore[attr-defined]
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    others = {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}
    ours = "gpuctl.trainers.launchers"
    assert others <= {"gpuctl.trainers", f"{ours}.adapter", f"{ours}.key_value_store", "jax"}
