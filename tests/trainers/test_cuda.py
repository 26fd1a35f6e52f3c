"""What only shows on a GPU: copies that are still on their way, generators and optimizer states that live there, NCCL.

What a CPU can do as well runs there too, so that a machine without a GPU tests the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gpuctl import Checkpointer
from gpuctl.bootstrap.boot import gate
from gpuctl.bootstrap.boot.idle import BUSY_GPU, GpuUse
from gpuctl.bootstrap.gpus import found_devices
from gpuctl.bootstrap.monitors.gpu_watch import GpuWatch
from gpuctl.trainers.checkpoint.save.host_buffer import HostBuffer, layout_of
from gpuctl.trainers.checkpoint.save.partition import partition_of
from gpuctl.trainers.checkpoint.state.rng import rng_state
from gpuctl.trainers.checkpoint.state.state_tensors import StateTensors, contents_of
from gpuctl.trainers.diagnostics.burn_in import burn_in
from gpuctl.trainers.diagnostics.nccl_log import transport
from gpuctl.trainers.gpus import gpus_in_use, gpus_of
from tests.trainers.rank_scripts import fitting, on_device
from tests.trainers.rank_scripts.checkpointing import kept, same
from tests.trainers.rank_scripts.fitting import Killing
from tests.trainers.ranks import Ranks, run
from tests.waiting import until

GPUS = torch.cuda.device_count()
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here")
on_two_gpus = pytest.mark.skipif(GPUS < 2, reason="torch does not find two NVIDIA GPUs here")
on_any = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
SEEN: dict[str, dict[str, str]] = {"cpu": {}, "cuda": {"CUDA_VISIBLE_DEVICES": "0"}}


def busy(gpu: str = "cuda") -> None:
    """Work for a GPU that takes it a good part of a second, after which it comes to what is queued next."""
    with torch.cuda.device(gpu):
        torch.cuda._sleep(1_000_000_000)


def written_by(device: str) -> dict[str, Tensor]:
    return {"large": torch.zeros(32 << 20, device=device), "odd": torch.zeros(257, 129, device=device).t()}


# -- saves -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_any
def test_a_save_holds_its_own_step_whatever_the_device_has_still_to_do(device: str, file_url: str) -> None:
    tensors, checkpointer = written_by(device), Checkpointer(file_url, keep=None)
    for step in (1, 2, 3):
        if device == "cuda":
            busy()
        for tensor in tensors.values():
            tensor.fill_(step)
        checkpointer.save(step, dict(tensors))
        for tensor in tensors.values():
            tensor.fill_(-step)
    checkpointer.wait()
    for step in (3, 2, 1):
        if device == "cuda":
            torch.cuda.synchronize()
        found: dict[str, Any] = dict(written_by(device))
        assert Checkpointer(file_url).restore(found) == step
        assert all(bool((tensor == step).all()) for tensor in found.values()), step
        newest = max(Path(file_url.removeprefix("file://")).glob(f"{step}-*"))
        next(newest.glob("00000-*")).unlink()  # so that the one before is restored next


@on_gpu
def test_a_save_waits_for_a_step_that_runs_on_another_stream(file_url: str) -> None:
    tensor, aside = torch.zeros(32 << 20, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        busy()
        tensor.fill_(1)
    kept(Checkpointer(file_url), 1, {"tensor": tensor})
    found: dict[str, Any] = {"tensor": torch.zeros(32 << 20)}
    assert Checkpointer(file_url).restore(found) == 1
    assert bool((found["tensor"] == 1).all())


@on_two_gpus
def test_a_save_waits_for_gpus_that_are_not_the_current_one() -> None:
    """A script that moves its model to ``cuda:1`` and sets no device."""
    assert torch.cuda.current_device() == 0
    tensor = torch.zeros(256 << 20, device="cuda:1")
    contents = StateTensors({"tensor": tensor}, {"tensor"}, set(), {})
    layout, staging = layout_of(partition_of(contents, 0, 1), {}), HostBuffer()
    staging.fill(layout, contents)
    busy("cuda:1")
    tensor.fill_(1)
    data = staging.fill(layout, contents)
    assert bool((torch.frombuffer(data, dtype=torch.float32) == 1).all())


def test_gpus_are_found_by_the_tensors_that_lie_on_them() -> None:
    there = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", index)) for index in (3, 0, 3)]
    assert gpus_of(cast("list[Tensor]", [*there, torch.empty(3)])) == [torch.device("cuda", 0), torch.device("cuda", 3)]
    assert gpus_of([torch.empty(3)]) == []


@on_gpu
def test_a_gpu_is_in_use_while_this_process_holds_memory_there() -> None:
    held = torch.empty(1 << 20, device="cuda")
    assert held.device in gpus_in_use()


@on_gpu
def test_the_host_buffer_is_pinned_where_a_gpu_is_in_use() -> None:
    contents = StateTensors({"some": torch.ones(1000, device="cuda")}, {"some"}, set(), {})
    staging = HostBuffer()
    staging.fill(layout_of(partition_of(contents, 0, 1), {}), contents)
    assert staging._buffer.is_pinned()


ON_CPU = """
import sys, torch
from gpuctl import Checkpointer
checkpointer, state = Checkpointer(sys.argv[1], every=1), {"model": torch.nn.Linear(8, 8)}
checkpointer.restore(state)
for step in (1, 2):
    checkpointer.step(step, state)
checkpointer.wait()
print(torch.cuda.is_initialized())
"""


@pytest.mark.slow
def test_checkpoints_of_a_training_on_the_cpu_take_nothing_of_a_gpu(file_url: str) -> None:
    ran = subprocess.run([sys.executable, "-c", ON_CPU, file_url], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


# -- restores ----------------------------------------------------------------------------------------------------------


OPTIMIZERS: list[Any] = [{}, {"fused": True}, {"foreach": True}, pytest.param({"capturable": True}, marks=on_gpu)]


@on_any
@pytest.mark.parametrize("options", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_goes_on_to_the_last_bit(
    device: str, options: dict[str, Any], precision: torch.dtype, file_url: str
) -> None:
    """Weights, the optimizer's moments and counters where they live, and the generator that dropout draws from."""
    if device == "cpu" and "capturable" in options:
        pytest.skip("a capturable optimizer is for GPUs")
    state = on_device.training(device, 0, **options)
    on_device.train(state, 5, precision)
    kept(Checkpointer(file_url), 5, state)
    on_device.train(state, 5, precision)
    expected = on_device.facts(state)
    again = on_device.training(device, 1, **options)
    assert Checkpointer(file_url).restore(again) == 5
    on_device.train(again, 5, precision)
    assert same(on_device.facts(again), expected)
    (counter, *_) = again["optimizer"].state.values()
    assert counter["step"].is_cuda == (device == "cuda" and bool({"fused", "capturable"} & options.keys()))


@on_gpu
def test_a_gradient_scaler_goes_on_to_the_last_bit(file_url: str) -> None:
    """Its scale doubles every 3 steps, so that it matters where it was."""
    state = {**on_device.training("cuda", 0), "scaler": torch.GradScaler("cuda", 2.0**8, growth_interval=3)}
    on_device.train(state, 5, torch.float16)
    kept(Checkpointer(file_url), 5, state)
    on_device.train(state, 5, torch.float16)
    again = {**on_device.training("cuda", 1), "scaler": torch.GradScaler("cuda", growth_interval=3)}
    assert Checkpointer(file_url).restore(again) == 5
    on_device.train(again, 5, torch.float16)
    assert same(on_device.facts(again), on_device.facts(state))
    assert again["scaler"].get_scale() == 2.0**11


@pytest.mark.slow
@on_any
def test_a_restore_fills_the_tensors_that_are_there(device: str, file_url: str) -> None:
    """On a GPU there may be no room for all of them once more."""
    model = torch.nn.Linear(8192, 4096).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8192, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    kept(Checkpointer(file_url), 1, state)
    tensors = list(contents_of(state, 0).tensors.values())
    expected = [tensor.to("cpu", copy=True) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert Checkpointer(file_url).restore(state) == 1
    assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(tensors, expected, strict=True))
    size = sum(tensor.nbytes for tensor in tensors)
    assert torch.cuda.max_memory_allocated() - before <= size // 10


@on_gpu
@pytest.mark.parametrize(("saved", "restored"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_from_one_device_to_the_other(saved: str, restored: str, file_url: str) -> None:
    state, other = on_device.training(saved, 0), on_device.training(restored, 1)
    on_device.train(state, 3)
    kept(Checkpointer(file_url), 3, state)
    assert Checkpointer(file_url).restore(other) == 3
    assert same(on_device.facts(other), on_device.facts(state))
    assert all(parameter.device.type == restored for parameter in other["model"].parameters())


@on_gpu
def test_the_generators_of_all_gpus_that_a_state_lies_on_are_kept() -> None:
    gpus = [torch.device("cuda", number) for number in range(GPUS)]
    assert len(rng_state(gpus)["cuda"]) == GPUS
    assert len(rng_state(gpus[-1:])["cuda"]) == 1


# -- losses ------------------------------------------------------------------------------------------------------------


@on_any
def test_trainer_killed_and_started_again_ends_with_the_same_bits(device: str, tmp_path: Path) -> None:
    (expected,) = run(1, fitting.fit, {}, 0.3, env=SEEN[device])
    options = {"checkpoints": str(tmp_path / "kept"), "checkpoint_every": 4}
    committed = f"{tmp_path}/kept/ledger/{2:012d}"  # the first version raises the fence
    with Ranks(1, fitting.fit, options, 0.3, Killing(0, 11, committed), env=SEEN[device]) as ranks:
        assert ranks.wait(first=0)[0].code == -signal.SIGKILL
    (found,) = run(1, fitting.fit, options, 0.3, env=SEEN[device])
    assert {tensor.device.type for tensor in found.values()} == {device}
    assert same(found, expected)


@on_any
def test_ddp_killed_and_started_again_ends_with_the_same_bits(device: str, tmp_path: Path) -> None:
    """In a process group of the device's own backend, whose ranks cannot share a GPU: so of one."""
    undisturbed, disturbed = f"file://{tmp_path}/undisturbed", f"file://{tmp_path}/disturbed"
    ((_, expected, _),) = run(1, on_device.ddp_run, device, undisturbed, 12, 4, env=SEEN[device])
    with Ranks(1, on_device.ddp_run, device, disturbed, 12, 4, 8, env=SEEN[device]) as ranks:
        assert ranks.wait(first=0)[0].code == -signal.SIGKILL
    ((begun, found, backend),) = run(1, on_device.ddp_run, device, disturbed, 12, 4, env=SEEN[device])
    assert (begun, backend) == (8, on_device.BACKENDS[device])
    assert same(found, expected)


# -- the machine -------------------------------------------------------------------------------------------------------


@on_gpu
def test_a_sound_gpu_passes_its_burn_in() -> None:
    gpu = torch.device("cuda", 0)
    check = burn_in("a", 0, gpu, 1.0)
    assert check.device == torch.cuda.get_device_name(gpu) and check.products > 1 and check.tflops > 1
    assert (check.wrong_products, check.wrong_words, check.trouble) == (0, 0, "")
    free, _ = torch.cuda.mem_get_info(gpu)
    assert 0.7 * free < check.memory_bytes < free


@on_gpu
def test_a_gpu_that_errs_is_found() -> None:
    calls = 0

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        torch.mm(left, right, out=out)
        if calls == 3:
            out.view(torch.int16)[100, 100] ^= 1

    def stuck(blocks: list[Tensor]) -> None:
        blocks[-1][12345] |= 1 << 40

    check = burn_in("a", 0, torch.device("cuda", 0), 1.0, multiply=multiply, between=stuck)
    assert (check.wrong_products, check.wrong_words) == (1, 2), "0xaa… and the numbers lack bit 40"


NCCL = """
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
dist.destroy_process_group()
"""


@on_gpu
def test_what_this_nccl_says_of_its_network_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DEBUG", "INFO"), ("DEBUG_SUBSYS", "INIT,NET,ENV"), ("DEBUG_FILE", str(tmp_path / "log"))):
        monkeypatch.setenv(f"NCCL_{name}", value)
    monkeypatch.setenv("NCCL_NET", "Socket")
    subprocess.run([sys.executable, "-c", NCCL], check=True, timeout=120)
    log = (tmp_path / "log").read_text()
    told = transport(log, os.environ)
    assert told.network == "socket" and told.interface, log
    assert "NCCL_NET=Socket is set: unset it" in told.clues, log


@on_gpu
def test_the_gate_lets_this_machine_pass_and_misses_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    count, memory = len(found_devices()), torch.cuda.get_device_properties(0).total_memory
    promise = {"gpus": count, "gpu_memory_gb": memory / 1e9, "fabric": "", "fabric_cards": 0}
    gate.check(promise)
    with pytest.raises(ValueError, match=rf"^{count} GPUs found, expected {count + 1}; CUDA sees {count} GPUs"):
        gate.check({**promise, "gpus": count + 1})


@on_gpu
def test_a_gpu_that_works_looks_busy() -> None:
    ask, matrix = GpuUse(), torch.ones(4096, 4096, device="cuda")

    def load() -> bool:
        for _ in range(100):
            torch.mm(matrix, matrix)
        return ask() >= BUSY_GPU

    until(load, "the load to show")


WARM = """
import torch
from gpuctl.trainers.launchers.preload import preload
from gpuctl.trainers.launchers.warm_interpreter import _EVERY_SCRIPT, cuda_has_begun
preload(_EVERY_SCRIPT)
print(cuda_has_begun(), end=" ")
torch.cuda.is_available() and torch.cuda.init()
print(cuda_has_begun() == torch.cuda.is_available())
"""


@pytest.mark.slow
@on_any
def test_what_a_warm_interpreter_imports_does_not_begin_cuda(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=True)
    assert ran.stdout == "False True\n"


@on_gpu
def test_the_driver_tells_how_a_gpu_is() -> None:
    """Events, memory errors, clocks: what the stand-in of ``tests/fakes/nvml.py`` cannot vouch for."""
    import pynvml

    pynvml.nvmlInit()
    watch = GpuWatch(pynvml, [0])
    watch.look()
    watch.wait()
    reading = watch._read(0, watch._handles[0])
    assert reading.celsius and not reading.lost and watch.ill == ""
