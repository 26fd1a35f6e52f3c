"""What ``jax.distributed.initialize`` is told; JAX itself is in ``tests/e2e/test_frameworks.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gpuctl.jax
from gpuctl.trainers import jax_world
from gpuctl.trainers.jax_world import place, teach
from gpuctl.trainers.launchers.process_group import _SITE

ROUND = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:4242", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TOLD = {
    "coordinator_address": "10.0.0.1:4242",
    "num_processes": 4,
    "process_id": 3,
    "heartbeat_timeout_seconds": 10,
}


def test_a_launched_process_knows_its_place() -> None:
    assert place(ROUND) == TOLD


def test_so_does_one_that_knows_torchruns_variables_alone() -> None:
    env = {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "2"}
    assert place(env) | {"coordinator_address": ""} == TOLD | {
        "coordinator_address": "",
        "num_processes": 2,
        "process_id": 1,
    }
    assert place(env)["coordinator_address"] == "[fd00::1]:9"


@pytest.mark.parametrize("env", [{}, {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}])
def test_a_process_alone_has_none(env: dict[str, str]) -> None:
    assert place(env) == {}


def test_one_process_under_the_launcher_is_a_world_of_one() -> None:
    assert place(ROUND | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"})["num_processes"] == 1


def _distributed(calls: list[dict[str, Any]]) -> ModuleType:
    def initialize(
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        local_device_ids: Any = None,
        heartbeat_timeout_seconds: int = 100,
    ) -> None:
        del local_device_ids
        calls.append(
            {
                "coordinator_address": coordinator_address,
                "num_processes": num_processes,
                "process_id": process_id,
                "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
            }
        )

    return SimpleNamespace(initialize=initialize)  # type: ignore[return-value]


def test_initialize_without_arguments_is_told_and_what_is_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ROUND.items():
        monkeypatch.setenv(name, value)
    calls: list[dict[str, Any]] = []
    distributed = _distributed(calls)
    teach(distributed)
    teach(distributed)
    distributed.initialize()
    distributed.initialize("other:1", process_id=0, heartbeat_timeout_seconds=60)
    assert calls == [TOLD, TOLD | {"coordinator_address": "other:1", "process_id": 0, "heartbeat_timeout_seconds": 60}]


def test_a_version_without_some_argument_is_not_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ROUND.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []

    def initialize(coordinator_address: str | None = None, num_processes: int | None = None) -> None:
        calls.append((coordinator_address, num_processes))

    older = SimpleNamespace(initialize=initialize)
    teach(older)  # type: ignore[arg-type]
    older.initialize()
    assert calls == [("10.0.0.1:4242", 4)]


def test_the_helper_does_nothing_where_there_is_nobody_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(distributed=_distributed(calls)))
    for name in (*ROUND, "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    gpuctl.jax.initialize()
    assert calls == []
    for name, value in ROUND.items():
        monkeypatch.setenv(name, value)
    gpuctl.jax.initialize(num_processes=2)
    assert calls == [TOLD | {"num_processes": 2}]
    assert gpuctl.jax.initialize is jax_world.initialize


def test_in_a_worker_jax_is_taught_as_it_is_imported(tmp_path: Path) -> None:
    """A stand-in package, as JAX is not installed here."""
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("from jax import distributed as distributed\n")
    (package / "distributed.py").write_text(
        textwrap.dedent(
            """
            def initialize(coordinator_address=None, num_processes=None, process_id=None):
                print(coordinator_address, num_processes, process_id)
            """
        )
    )
    env = {**os.environ, **ROUND, "PYTHONPATH": os.pathsep.join([_SITE, str(tmp_path)])}
    command = [sys.executable, "-c", "import jax; jax.distributed.initialize()"]

    def printed(launcher: str) -> str:
        return subprocess.run(
            command, env=env | {"GPUCTL_LAUNCHER": launcher}, capture_output=True, text=True, check=True
        ).stdout

    assert printed("jax") == "10.0.0.1:4242 4 3\n"
    assert printed("exec") == "None None None\n"
