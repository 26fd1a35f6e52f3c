"""What ``gpuctl ckpt pull`` makes of a checkpoint loads in plain PyTorch, and is what was saved to the last bit."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gpuctl import Checkpointer
from gpuctl.cluster import layout
from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.checkpoints.export import pull as checkpoints_pull
from gpuctl.cluster.checkpoints.export.pull import OnBytes, OpenCheckpoint
from gpuctl.cluster.checkpoints.export.safetensors import write_safetensors
from gpuctl.cluster.errors import BadInput, Damaged
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.trainers.checkpoint.torch_export import write_dcp, write_torch
from tests.fakes.checkpoints import Maker, Raw
from tests.trainers.rank_scripts import checkpointing
from tests.trainers.rank_scripts.checkpointing import facts, same, training
from tests.trainers.ranks import run

JOB = "job"


def place(bucket: str) -> str:
    """Where the job's own ``Checkpointer`` would save."""
    return f"{bucket}/{layout.checkpoints(JOB)}"


def pull(bucket: str, folder: Path, write: Callable[[OpenCheckpoint, Path, OnBytes], None]) -> Path:
    """The newest checkpoint."""
    store = open_bucket(bucket)
    opened = checkpoints_pull.open_entry(store, JOB, listing.find(store, JOB, "last"))
    told: list[int] = []
    with checkpoints_pull.new_files(folder, opened.tensor_bytes) as aside:
        write(opened, aside, told.append)
    assert sum(told) == opened.bytes_to_read
    return folder


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_every_item_of_the_state_comes_back_in_plain_pytorch(tmp_path: Path, file_url: str) -> None:
    saved, _ = run(2, checkpointing.save_some, place(file_url), [3, 5])[0]
    folder = pull(file_url, tmp_path / "out", write_torch)
    assert {path.stem for path in folder.iterdir()} == set(saved)
    state = training(seed=1)
    for name in ("model", "optimizer", "scheduler"):
        state[name].load_state_dict(loaded(folder / f"{name}.pt"))
    state |= {name: loaded(folder / f"{name}.pt") for name in ("seen", "average")}
    assert same(facts(state), saved)


_LOAD = """
import sys
sys.modules["gpuctl"] = None
import torch
from torch import nn
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
model.load_state_dict(torch.load("model.pt", weights_only=True))
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(torch.load("optimizer.pt", weights_only=True))
model(torch.ones(4, 5)).square().mean().backward()
optimizer.step()
print(optimizer.param_groups[0]["lr"], sorted({int(state["step"]) for state in optimizer.state.values()}))
"""


@pytest.mark.slow
def test_nothing_of_ours_is_needed_to_load_a_sharded_model_and_its_optimizer(tmp_path: Path, file_url: str) -> None:
    weights = run(3, checkpointing.save_sharded, place(file_url))[0]
    folder = pull(file_url, tmp_path / "out", write_torch)
    assert same(dict(loaded(folder / "model.pt")), weights)
    done = subprocess.run([sys.executable, "-c", _LOAD], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0.01 [3]\n"), done.stderr


def test_dcp_loads_into_a_model_and_turns_into_one_file(tmp_path: Path, file_url: str) -> None:
    weights = run(2, checkpointing.save_sharded, place(file_url))[0]
    folder = pull(file_url, tmp_path / "out", write_dcp)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({"model": model.state_dict()}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert same(dict(model.state_dict()), weights)
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    whole = loaded(tmp_path / "one.pt")
    assert whole.keys() == {"model", "optimizer"}
    assert whole["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_safetensors_are_what_load_state_dict_takes(tmp_path: Path, file_url: str) -> None:
    weights = run(2, checkpointing.save_sharded, place(file_url))[0]
    folder = pull(file_url, tmp_path / "out", write_safetensors)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert same(dict(model.state_dict()), weights)
    assert load_file(folder / "optimizer.safetensors")["state.0.weight.exp_avg"].shape == (7, 5)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


def zoo() -> dict[str, torch.Tensor]:
    """Every dtype, bits that are no numbers included, and shapes without elements or dimensions."""
    raw = torch.arange(256, dtype=torch.uint8)
    found = {str(dtype): raw.clone().view(dtype).reshape(2, -1) for dtype in DTYPES if dtype != torch.bool}
    return {
        **found,
        "bool": raw % 2 == 0,
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "one": torch.ones(1, 1),
    }


@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
def test_every_dtype_and_shape_comes_back_bit_by_bit(tmp_path: Path, file_url: str, form: str) -> None:
    tensors = zoo()
    checkpointer = Checkpointer(place(file_url))
    checkpointer.save(1, {"zoo": tensors})
    checkpointer.wait()
    write = {"torch": write_torch, "dcp": write_dcp, "safetensors": write_safetensors}[form]
    folder = pull(file_url, tmp_path / "out", write)
    if form == "dcp":
        dcp_to_torch_save(folder, tmp_path / "one.pt")
        found = loaded(tmp_path / "one.pt")["zoo"]
    else:
        found = loaded(folder / "zoo.pt") if form == "torch" else load_file(folder / "zoo.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert _bits(found[name]) == _bits(tensor), name


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_values_of_any_kind_come_back_and_arrays_as_tensors(tmp_path: Path, file_url: str) -> None:
    values = {"raw": b"\0\xff", 5: "five", None: (1, [2.5, float("inf")]), "array": np.arange(3)}
    checkpointer = Checkpointer(place(file_url))
    checkpointer.save(1, {"../values": values, "epoch": 7})
    checkpointer.wait()
    folder = pull(file_url, tmp_path / "out", write_torch)
    assert loaded(folder / "epoch.pt") == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket", "out"]
    found = loaded(folder / "..%2Fvalues.pt")
    assert same(found.pop("array"), torch.arange(3))
    assert same(found, {key: value for key, value in values.items() if key != "array"})


def test_what_no_format_can_hold_is_told_and_leaves_nothing(tmp_path: Path, file_url: str) -> None:
    maker = Maker(listing.folder(open_bucket(file_url), JOB))
    maker.save(1, {"model": {"w": Raw("complex128", (1,), bytes(16))}})
    with pytest.raises(BadInput, match=r"safetensors has no complex128, the dtype of model\.w; use --format torch"):
        pull(file_url, tmp_path / "out", write_safetensors)
    assert loaded(pull(file_url, tmp_path / "as torch", write_torch) / "model.pt")["w"].dtype == torch.complex128
    for raw, said in (
        (Raw("float7", (8,), bytes(8)), "this version of torch has no dtype 'float7'"),
        (Raw("load", (8,), bytes(8)), "this version of torch has no dtype 'load'"),
        (Raw("float32", (8,), bytes(16)), r"a tensor of \[8\] float32 has 16 bytes"),
    ):
        maker.save(2, {"model": {"w": raw}}, attempt=len(said))
        with pytest.raises(Damaged, match=said):
            pull(file_url, tmp_path / "out", write_torch)
    assert not (tmp_path / "out").exists()
