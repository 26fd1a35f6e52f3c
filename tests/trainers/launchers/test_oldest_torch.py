"""What the launcher asks of torch, beside what the oldest torch that is supported has (see ``make test-torch``)."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import api

from gpuctl.trainers.launchers import torchrun, worker_processes
from gpuctl.trainers.launchers.worker_processes import Workers
from tests.waiting import PATIENCE_S, until

CONFIG = {
    *("min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role", "rdzv_endpoint", "rdzv_backend"),
    *("rdzv_configs", "rdzv_timeout", "max_restarts", "monitor_interval", "start_method", "log_line_prefix_template"),
    *("metrics_cfg", "local_addr", "event_log_handler", "numa_options"),
}
"""The fields of ``LaunchConfig`` in torch 2.9.0."""


class Asked(Exception):
    """What ``elastic_launch`` is asked for."""


def test_the_configuration_is_one_that_torch_2_9_knows_and_leaves_cuda_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are forked from the process that makes it: had it begun CUDA, no worker could use a GPU."""
    real, options = api.LaunchConfig, dict[str, Any]()

    def config(**given: Any) -> api.LaunchConfig:
        options.update(given)
        return real(**given)

    def launched(made: api.LaunchConfig, _: object) -> None:
        raise Asked(made)

    monkeypatch.setattr(api, "LaunchConfig", config)
    monkeypatch.setattr(api, "elastic_launch", launched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA is begun"))
    monkeypatch.setattr(worker_processes, "install", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", "")
    spec = torchrun.LaunchSpec(
        job="job-1",
        round=1,
        rank=0,
        nodes=1,
        nproc=1,
        address="127.0.0.1",
        master_address="127.0.0.1",
        master_port=1,
        script="train.py",
        args=(),
        cwd=str(tmp_path),
        env={},
        log_dir=str(tmp_path),
    )
    with pytest.raises(Asked) as asked:
        torchrun.launch(spec, None)
    assert set(options) <= CONFIG
    assert asked.value.args[0].numa_options is None


def _is_deaf(there: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(there).touch()
    time.sleep(600)


def test_a_worker_that_ignores_sigterm_is_killed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch up to 2.11 has no setting for it."""
    monkeypatch.setattr(worker_processes, "_SHUTDOWN_S", 0.2)
    there = tmp_path / "there"
    workers = Workers(
        "train",
        _is_deaf,
        {0: (str(there),)},
        {0: {}},
        "fork",
        DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL),
    )
    workers.start()
    until(there.exists, "the worker to be there")
    closing = threading.Thread(target=workers.close, args=(signal.SIGTERM, 1_000_000), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert workers._pc and workers._pc.processes[0].exitcode == -signal.SIGKILL
